"""Pure accounting: signed keys, the learner's fold, ledger chains, ticket states, admission and the audit."""
