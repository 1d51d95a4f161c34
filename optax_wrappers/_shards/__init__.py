"""Updates of shards and towers, reduced to one."""
