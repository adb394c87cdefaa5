"""What is sent to servers: requests with their times, read from files or made from a seed."""
