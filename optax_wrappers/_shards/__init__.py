"""Reduction of the updates of shards and towers."""
