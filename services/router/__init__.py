"""The router: places requests on serving workers (paper 4.1.1). Stateless but for hints, so there can be many."""
