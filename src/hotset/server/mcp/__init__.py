"""Tools of MCP servers for the page: the operator's file, processes and connections, routes."""
