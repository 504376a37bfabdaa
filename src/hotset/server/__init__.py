"""The server: several API schemas of HTTP for one engine. The event loop never waits for a step."""
