"""The server: several API schemas of HTTP in front of one engine, for whose steps the event loop never
waits."""
