"""kdecode: the Kimi K3 model family, decoded at low latency."""
