"""The server: several API schemas of HTTP in front of one engine, whose steps nobody here waits for."""
