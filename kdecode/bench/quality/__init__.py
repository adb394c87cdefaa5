"""Whether two servers answer equally well: tasks with known answers, graded in pairs."""
