"""Planning: how many rounds, local steps and clients a round a budget is best spent on."""
