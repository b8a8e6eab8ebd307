"""Many runs of one scenario: what is varied, where it runs, and where the results lie."""
