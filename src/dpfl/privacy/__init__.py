"""Privacy: mechanisms, exact accounting, the papers' claims, calibration, the ledger and the certificate."""
