"""The engines behind one frontend: a ReplicaSet of Replicas, each with a Link to its present engine core."""
