"""A merged run in the formats of other tools. Reads what `merge` wrote; changes nothing of it."""
