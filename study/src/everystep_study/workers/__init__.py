"""Processes of our own that follow orders: frameworks in environments of their own, and real ranks.

| module | what it owns |
|---|---|
| `processes` | the processes, seen from the harness: started, asked, timed out, killed |
| `worker` | the same from inside: reads orders and answers them |
| `orders` | the orders that several suites give to a framework; a suite's own are in its file |
| `rank_orders` | the orders that ranks follow |
"""
