"""The oracles: each reads a ledger and adds what is wrong to the findings."""
