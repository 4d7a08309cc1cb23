"""What a rank without data does for a sharded optimizer, inside a Join context.

The ranks that still have data say what they are about to do, and hand over what a rank without data cannot know; that
one does its part with it. Data flows from the hook of the context to the coordinator of the steps.
"""
