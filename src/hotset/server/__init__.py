"""The server: several dialects of HTTP in front of one engine, whose steps nobody here waits for."""
