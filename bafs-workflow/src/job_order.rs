//! Questions about the order of jobs: is there a cycle, does one job come before another. It knows
//! parents and children only, no volumes.

use super::limits::{DIAGNOSTICS_MAX, SEARCH_EDGES_MAX};
use super::model::{Job, JobIndex, topological_sort};

/// Cycles that share no job, as many as are reported; each begins with its smallest index.
pub(super) fn find_cycles(jobs: &[Job]) -> Vec<Vec<JobIndex>> {
    let mut stuck = vec![true; jobs.len()];
    for job in topological_sort(jobs) {
        stuck[job.as_usize()] = false;
    }
    let mut cycles = Vec::new();
    // Every job that is stuck has a parent that is stuck, so walking up must come round.
    let mut visited_in = vec![0u32; jobs.len()];
    let mut round = 0;
    for start in 0..jobs.len() {
        if cycles.len() == DIAGNOSTICS_MAX {
            break;
        }
        round += 1;
        let mut path = Vec::new();
        let mut at = start;
        while stuck[at] && visited_in[at] == 0 {
            visited_in[at] = round;
            path.push(JobIndex(at as u32));
            let up = jobs[at]
                .parents
                .iter()
                .find(|parent| stuck[parent.as_usize()]);
            at = up.map_or(start, |parent| parent.as_usize());
        }
        if stuck[at] && visited_in[at] == round {
            let cycle_start = path
                .iter()
                .position(|job| job.as_usize() == at)
                .unwrap_or(0);
            cycles.push(rotate_to_smallest(&path[cycle_start..]));
        }
    }
    cycles
}

/// A walk towards parents as a cycle towards children.
fn rotate_to_smallest(upwards: &[JobIndex]) -> Vec<JobIndex> {
    let mut cycle: Vec<JobIndex> = upwards.iter().rev().copied().collect();
    let smallest = cycle.iter().enumerate().min_by_key(|(_, job)| **job);
    let first = smallest.map_or(0, |(position, _)| position);
    cycle.rotate_left(first);
    cycle
}

/// All searches together were given enough time, and there is more to search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchTooLong;

/// Answers whether one job is ordered before another, for a graph without cycle.
///
/// A search walks from both ends in turns and always goes on where fewer edges were looked at, so
/// that neither a first job with a million children nor a last one with a million parents is ever
/// walked through. Jobs outside the depths between both ends are left out. For the shapes that
/// workflows have (pipelines, fans, diamonds) a search ends after a few edges; a tangled graph is
/// stopped by a budget over all searches.
pub struct OrderSearch<'w> {
    jobs: &'w [Job],
    /// The place of each job in the topological order.
    rank: Vec<u32>,
    /// The length of the longest path that leads to each job.
    depth: Vec<u32>,
    /// The round in which a job was last seen from the start, and from the end.
    seen_rounds: [Vec<u32>; 2],
    round: u32,
    edges_left: u64,
}

impl<'w> OrderSearch<'w> {
    /// A search over jobs without a cycle, with the whole budget.
    pub fn new(jobs: &'w [Job]) -> Self {
        let order = topological_sort(jobs);
        assert_eq!(order.len(), jobs.len(), "cycles are refused before");
        let mut rank = vec![0; jobs.len()];
        let mut depth = vec![0; jobs.len()];
        for (position, &job) in order.iter().enumerate() {
            rank[job.as_usize()] = position as u32;
            for child in &jobs[job.as_usize()].children {
                depth[child.as_usize()] = depth[child.as_usize()].max(depth[job.as_usize()] + 1);
            }
        }
        let seen = [vec![0; jobs.len()], vec![0; jobs.len()]];
        Self {
            jobs,
            rank,
            depth,
            seen_rounds: seen,
            round: 0,
            edges_left: SEARCH_EDGES_MAX,
        }
    }

    /// The place of a job in the topological order.
    pub(super) fn rank(&self, job: JobIndex) -> u32 {
        self.rank[job.as_usize()]
    }

    /// Whether `first` is an ancestor of `last`.
    ///
    /// # Errors
    /// The budget of all searches is spent.
    pub fn is_before(&mut self, first: JobIndex, last: JobIndex) -> Result<bool, SearchTooLong> {
        if self.depth[first.as_usize()] >= self.depth[last.as_usize()] {
            return Ok(false);
        }
        self.round += 1;
        let ends = [first, last];
        let mut frontier = ends.map(|end| vec![end]);
        let mut looked_at = [0usize; 2];
        for (side, end) in ends.into_iter().enumerate() {
            self.seen_rounds[side][end.as_usize()] = self.round;
        }
        while let (Some(&down), Some(&up)) = (frontier[0].last(), frontier[1].last()) {
            let cost_down = looked_at[0] + self.neighbours(0, down).len();
            let cost_up = looked_at[1] + self.neighbours(1, up).len();
            let side = usize::from(cost_up < cost_down);
            let Some(job) = frontier[side].pop() else {
                break;
            };
            let neighbours = self.neighbours(side, job);
            looked_at[side] += neighbours.len();
            let left = self.edges_left.checked_sub(neighbours.len() as u64);
            self.edges_left = left.ok_or(SearchTooLong)?;
            for &neighbour in neighbours {
                let at = neighbour.as_usize();
                if self.seen_rounds[1 - side][at] == self.round {
                    return Ok(true);
                }
                if self.seen_rounds[side][at] != self.round && self.is_between(neighbour, ends) {
                    self.seen_rounds[side][at] = self.round;
                    frontier[side].push(neighbour);
                }
            }
        }
        Ok(false)
    }

    /// Children when walking down from the start, parents when walking up from the end.
    fn neighbours(&self, side: usize, job: JobIndex) -> &'w [JobIndex] {
        let job = &self.jobs[job.as_usize()];
        if side == 0 {
            &job.children
        } else {
            &job.parents
        }
    }

    fn is_between(&self, job: JobIndex, [first, last]: [JobIndex; 2]) -> bool {
        let depth = self.depth[job.as_usize()];
        depth > self.depth[first.as_usize()] && depth < self.depth[last.as_usize()]
    }
}
