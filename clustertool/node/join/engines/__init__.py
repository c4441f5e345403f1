"""What the engines of machines that join state and decide: their allocations, and addresses of their hosts."""
