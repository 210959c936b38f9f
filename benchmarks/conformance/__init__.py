"""Plays streams of engine events to KV-aware routers, and scores what they say is cached."""
