"""OpenAI's Responses API, served as a chat: its requests become one, and the pieces of the answer items and events."""
