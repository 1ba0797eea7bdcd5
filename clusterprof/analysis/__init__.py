"""From merged tables to accounts and findings: pure functions, tables in, tables out."""
