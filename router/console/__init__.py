"""The web console: static pages, and the JSON that they ask for. Served by the router's HTTP server at /console."""
