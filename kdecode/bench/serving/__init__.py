"""Servers with OpenAI's interface, measured from outside: the client, its load, the comparison."""
