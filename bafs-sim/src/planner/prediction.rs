//! How long a strategy takes by the model that BAFS uses. Seconds in `f64`. It neither decides
//! feasibility nor chooses.
//!
//! `docs/explanation/planning.md` gives the reason of each correction, by the same numbers.

use bafs_sched::Strategy;

use super::environment::{Environment, NodeClass};
use super::expected_times::{ComputeTimes, expected_maximum_normal, expected_response_s};
use super::shape::Shape;
use super::strategy::{Allocation, StrategyAllocation};

/// Rounds of failed pipelines that are modelled separately; later rounds are assumed to lose the
/// same share.
const FAILURE_ROUNDS_MAX: usize = 64;

/// Content of the caches at the start of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheState {
    /// The content before the first round.
    Initial,
    /// Empty caches.
    Cold,
    /// All.
    Warm,
}

/// The predicted run time by the model that BAFS uses. `None` if the strategy is impossible or
/// never finishes at this failure rate. `None` for [`Strategy::Need`], unless everything fits at
/// once and each node with processors has space for jobs' data: with less storage it is only
/// simulated. Slower links, longer jobs and more variability never make it shorter.
pub fn predict_time(strategy: Strategy, shape: &Shape, environment: &Environment) -> Option<f64> {
    predict_remaining(strategy, shape, environment, 1.0)
}

/// The same for the remaining workload, of whose batch data this share is not cached.
pub fn predict_remaining(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
    missing: f64,
) -> Option<f64> {
    let environment = &*environment.usable_nodes(shape);
    let allocation = strategy.plan_allocation(shape, environment);
    predict_allocation(&allocation, shape, environment, missing)
}

/// The same when it is known how the strategy runs this shape, on nodes as its jobs see them.
pub(super) fn predict_allocation(
    allocation: &Allocation,
    shape: &Shape,
    environment: &Environment,
    missing: f64,
) -> Option<f64> {
    allocation.is_possible().then_some(())?;
    let strategy = allocation.strategy;
    let round = |width, caches| {
        let (shape, allocation) = &allocate_part(allocation, shape, environment, width);
        let model = RoundModel {
            shape,
            environment,
            allocation,
            // Later rounds find the data that the strategy keeps.
            missing_fraction: match caches {
                CacheState::Initial => missing,
                CacheState::Cold | CacheState::Warm => 1.0,
            },
        };
        let seconds = model.round_s(caches);
        (seconds, model.failed_pipelines(seconds))
    };
    if strategy == Strategy::Need {
        let all = Strategy::All.plan_allocation(shape, environment);
        all.is_possible().then_some(())?;
        let mut nodes = environment.nodes.iter();
        let has_room = |class: &NodeClass| u128::from(class.storage_bytes) >= shape.running_bytes;
        nodes
            .all(|class| class.cpus == 0 || has_room(class))
            .then_some(())?;
    }
    let seconds = with_failures(strategy, shape.width, round)?;
    Some(seconds.max(shape.time_s_min(environment)))
}

/// So many of the pipelines, and how the strategy runs them. That is not found out again for all of
/// them: it may have to look for the place of each volume.
pub(super) fn allocate_part(
    allocation: &Allocation,
    shape: &Shape,
    environment: &Environment,
    width: u64,
) -> (Shape, Allocation) {
    if width == shape.width {
        return (shape.clone(), allocation.clone());
    }
    let shape = shape.with_width(width);
    let allocation = allocation.strategy.plan_allocation(&shape, environment);
    (shape, allocation)
}

/// Repeats the failed pipelines until none remains (Fig 4.15). Strategies that keep their batch
/// data find warm caches from the second round on.
///
/// Whole pipelines fail, and of a few so many may round to as many: then the same round comes again
/// and again, each time less likely.
pub(super) fn with_failures(
    strategy: Strategy,
    width: u64,
    round: impl Fn(u64, CacheState) -> (f64, f64),
) -> Option<f64> {
    let (mut seconds, mut width, mut caches) = (0.0, width, CacheState::Initial);
    let kept = match strategy.has_retained_batch_data() {
        true => CacheState::Warm,
        false => CacheState::Cold,
    };
    for at in 1.. {
        let (round_s, failed) = round(width, caches);
        seconds += round_s;
        if failed < 0.5 {
            return Some(seconds);
        }
        // A round cannot lose more pipelines than it has.
        let left = (failed.round() as u64).min(width);
        if left == width || at == FAILURE_ROUNDS_MAX {
            let (again_s, failed_again) = round(left, kept);
            let (lost, lost_again) = (failed / left as f64, failed_again / left as f64);
            let again = lost.min(1.0) / (1.0 - lost_again);
            return (lost_again < 1.0).then_some(seconds + again_s * again);
        }
        (width, caches) = (left, kept);
    }
    None
}

/// The corrected model of one round.
struct RoundModel<'m> {
    shape: &'m Shape,
    environment: &'m Environment,
    allocation: &'m Allocation,
    /// The part of the batch data that is not in caches when the round starts.
    missing_fraction: f64,
}

impl RoundModel<'_> {
    fn round_s(&self, caches: CacheState) -> f64 {
        match self.allocation.strategy {
            Strategy::Remote => self.remote_s(),
            Strategy::All | Strategy::AllBatch | Strategy::Need => self.depth_first_s(caches),
            Strategy::AllPrivate | Strategy::Slice => {
                self.breadth_first_s(self.shape.width, self.missing_fraction)
            }
            Strategy::Minimal => self.partial_slices_s(),
        }
    }

    /// (C9) A failed node takes the scratch volumes of all pipelines that have begun with it, not
    /// one pipeline: breadth first has begun them all, a few may miss it.
    fn failed_pipelines(&self, seconds: f64) -> f64 {
        let Some(mtbf_s) = self.environment.mtbf_s else {
            return 0.0;
        };
        let begun = match self.allocation.strategy {
            Strategy::AllPrivate | Strategy::Slice | Strategy::Minimal => {
                self.allocation.part_width
            }
            Strategy::All | Strategy::AllBatch | Strategy::Remote | Strategy::Need => {
                self.running()
            }
        };
        let on_a_node = begun as f64 / self.environment.computing_nodes() as f64;
        seconds / mtbf_s as f64 * on_a_node
    }

    fn running(&self) -> u64 {
        self.allocation
            .running_pipelines(self.shape, self.environment)
    }

    /// No barriers: each pipeline is one customer of the link to home.
    fn depth_first_s(&self, caches: CacheState) -> f64 {
        let (running, depth) = (self.running(), self.shape.depth as f64);
        let batch_bytes = match caches {
            CacheState::Initial | CacheState::Cold => {
                self.shape.batch_total_bytes as f64 * self.missing_fraction
            }
            CacheState::Warm => 0.0,
        };
        let endpoint_bytes = self.shape.endpoint_in_bytes + self.shape.endpoint_out_bytes;
        let stage = LevelModel {
            jobs: self.shape.width,
            fetch_s: self.fetch_s(batch_bytes),
            batch_s: self.home_transfer_s(batch_bytes),
            read_s: depth * self.read_s(running),
            work_s: depth * self.other_work_s(running),
            last_work_s: depth * self.other_work_s(running),
            demand_s: self.home_transfer_s(endpoint_bytes),
            own_link_s: self.own_link_s(endpoint_bytes),
        };
        let waves = LevelWaves::for_jobs(self.shape.width, running, 1);
        // (C5) Also without barriers the run ends with its last pipeline.
        let spread_s = self.compute_times().deviation_s
            * (depth * waves.total()).sqrt()
            * expected_maximum_normal(running);
        stage.duration_s(running, waves) + spread_s
    }

    /// Stage after stage for `width` pipelines, of whose batch data `fetched` (a share) comes
    /// from home.
    fn breadth_first_s(&self, width: u64, fetched: f64) -> f64 {
        let depth = self.shape.depth;
        let batch_bytes = self.shape.batch_total_bytes as f64 / depth as f64 * fetched;
        let (inner, outer) = (self.running().min(width), self.outer_concurrency(width));
        let stage = |running: u64, endpoint_bytes: f64, waves: LevelWaves| {
            let stage = LevelModel {
                jobs: width,
                fetch_s: self.fetch_s(batch_bytes),
                batch_s: self.home_transfer_s(batch_bytes),
                read_s: self.read_s(running),
                work_s: self.other_work_s(running),
                last_work_s: self.other_work_s(waves.last_wave_jobs),
                demand_s: self.home_transfer_s(endpoint_bytes),
                own_link_s: self.own_link_s(endpoint_bytes),
            };
            stage.duration_s(running, waves)
        };
        let (input, output) = (self.shape.endpoint_in_bytes, self.shape.endpoint_out_bytes);
        let outer_waves = match depth {
            1 => LevelWaves::for_jobs(width, outer, 1),
            _ if inner >= outer => self.waves(width, outer),
            _ => self.outer_waves(width, outer, inner),
        };
        let inner_waves = self.waves(width, inner);
        let seconds = if depth == 1 {
            stage(outer, input + output, outer_waves)
        } else {
            stage(outer, input, outer_waves)
                + stage(outer, output, outer_waves)
                + (depth - 2) as f64 * stage(inner, 0.0, inner_waves)
        };
        // (C5) Each barrier waits for the last of the running jobs, not for one deviation.
        let (last, waves) = match depth {
            1 | 2 => (outer, outer_waves),
            _ => (inner, inner_waves),
        };
        let segments = self.barrier_count(width, last) as f64;
        let stages = depth as f64 / segments;
        let times = self.compute_times();
        let spread_s =
            times.deviation_s * (waves.total() * stages).sqrt() * expected_maximum_normal(last);
        seconds + segments * spread_s.min(self.tail_s(last))
    }

    /// (C5) Where jobs wait for processors, one that is late takes fewer of them: no time is lost
    /// until the last have started, then the longest rest among those that run, beyond a usual one.
    fn tail_s(&self, running: u64) -> f64 {
        let times = self.compute_times();
        // At a random time, at least half of a running job remains.
        (times.longest_remaining_s(running) - times.mean_s / 2.0).max(0.0)
    }

    /// Waves of one stage. Only between barriers the processors that a stage leaves idle at its
    /// end can take jobs of the next.
    fn waves(&self, width: u64, running: u64) -> LevelWaves {
        let stretches = self.barrier_count(width, running);
        LevelWaves::for_jobs(width, running, self.shape.depth.div_ceil(stretches))
    }

    /// (C5) Stretches of stages at whose ends pipelines really wait. With two batch volumes and two
    /// waves no pipeline does: breadth first, a level has ended when the level after the next
    /// begins.
    fn barrier_count(&self, width: u64, running: u64) -> u64 {
        let never_waits = self.allocation.batch_volumes >= 2 && width >= 2 * running;
        match never_waits {
            true => 1,
            false => self.allocation.segments(self.shape.depth),
        }
    }

    /// Pipelines at once in the first and last stage, where not all hold something (C6).
    fn outer_concurrency(&self, width: u64) -> u64 {
        let concurrency = match self.allocation.strategy {
            Strategy::Slice => {
                Strategy::Minimal
                    .plan_allocation(self.shape, self.environment)
                    .concurrency
            }
            _ => self.allocation.concurrency,
        };
        concurrency
            .min(self.environment.concurrent_jobs(self.shape))
            .min(width)
    }

    /// (C6) Waves of the first and last stage. Pipelines that have not begun, or are done, hold
    /// nothing: until storage for `places` private volumes is taken, `outer` run at once.
    fn outer_waves(&self, width: u64, outer: u64, inner: u64) -> LevelWaves {
        let places = self
            .environment
            .storage_bytes()
            .saturating_sub(self.shape.batch_bytes);
        let begun = places
            .saturating_sub(self.shape.running_bytes * u128::from(outer))
            .checked_div(self.shape.waiting_bytes)
            .map_or(width, |waiting| {
                (waiting + u128::from(outer)).min(width.into()) as u64
            });
        if begun >= width || inner >= outer {
            return LevelWaves::for_jobs(width, outer, 1);
        }
        let rest = LevelWaves::for_jobs(width - begun, inner, 1);
        LevelWaves {
            full_waves: begun as f64 / outer as f64 + rest.full_waves,
            ..rest
        }
    }

    /// (C7) Each part refetches the batch data that the one before did not keep.
    fn partial_slices_s(&self) -> f64 {
        let Allocation {
            cycles,
            part_width,
            last_part_width,
            ..
        } = *self.allocation;
        let kept = self.allocation.retained_levels(self.shape) as f64 / self.shape.depth as f64;
        let again = 1.0 - kept;
        if cycles == 1 {
            return self.breadth_first_s(part_width, self.missing_fraction);
        }
        let between = (cycles - 2) as f64 * self.breadth_first_s(part_width, again);
        self.breadth_first_s(part_width, self.missing_fraction)
            + between
            + self.breadth_first_s(last_part_width, again)
    }

    /// Everything crosses the link to home, for each job again.
    fn remote_s(&self) -> f64 {
        let (running, depth) = (self.running(), self.shape.depth as f64);
        let private_bytes = depth * 2.0 * self.shape.private_io_bytes;
        let batch_bytes = self.shape.batch_read_bytes;
        let stage = LevelModel {
            jobs: self.shape.width,
            fetch_s: 0.0,
            batch_s: 0.0,
            read_s: 0.0,
            work_s: depth * self.compute_times().mean_s,
            last_work_s: depth * self.compute_times().mean_s,
            // Jobs side by side have their own links, but share that to home.
            demand_s: self.home_transfer_s(self.shape.pipeline_jobs * batch_bytes + private_bytes),
            own_link_s: self.own_link_s(depth * batch_bytes + private_bytes),
        };
        let waves = LevelWaves::for_jobs(self.shape.width, running, 1);
        let spread_s = self.compute_times().deviation_s
            * (depth * waves.total()).sqrt()
            * expected_maximum_normal(running);
        stage.duration_s(running, waves) + spread_s
    }

    /// Time of a job apart from the link to home: (C3) it reads only the blocks that are not on its
    /// own node, (C2) over links that concurrent jobs share.
    fn other_work_s(&self, running: u64) -> f64 {
        self.read_s(running) + self.non_batch_s(running)
    }

    /// Time of a job apart from reading batch data.
    fn non_batch_s(&self, running: u64) -> f64 {
        2.0 * self.shape.private_io_bytes / self.link_rate_per_job(running)
            + self.compute_times().mean_s
    }

    /// The part of a node's link that each of the running jobs has.
    fn link_rate_per_job(&self, running: u64) -> f64 {
        let environment = self.environment;
        let ends = environment
            .storing_nodes()
            .min(environment.computing_nodes());
        let share = (ends.max(1) as f64 / running as f64).min(1.0);
        environment.local_bytes_per_s as f64 * share
    }

    /// (C2) Batch data come over the reader's link, but where few nodes have room for parts of a
    /// cache, over those few links: readers elsewhere take what these nodes pass on.
    fn read_s(&self, running: u64) -> f64 {
        let (holders, nodes) = (
            self.cache_nodes().max(1),
            self.environment.storing_nodes().max(1),
        );
        let (holders, nodes) = (holders as f64, nodes as f64);
        // (C3) However many hold parts, a reader's own node holds one node's share on average.
        let at_peers = self.shape.batch_read_bytes * (1.0 - 1.0 / nodes);
        let through_others = self.shape.batch_read_bytes * self.remote_reader_fraction(running);
        let own_s = (at_peers + through_others) / self.link_rate_per_job(running);
        let readers = self.environment.computing_nodes().max(1) as f64;
        if holders >= readers {
            return own_s;
        }
        let passed_on = self.shape.batch_read_bytes * (1.0 - holders / readers);
        let all = self.environment.local_bytes_per_s as f64 * holders;
        let demand_s = (at_peers + passed_on) / all;
        own_s.max(expected_response_s(
            running,
            demand_s,
            self.non_batch_s(running),
        ))
    }

    /// (C2) The share of jobs that read a cache through another node, which serves the data that it
    /// has from its peers. Depth first, the few running pipelines have their scratch volumes, and
    /// so their jobs, on the nodes without a cache partition.
    fn remote_reader_fraction(&self, running: u64) -> f64 {
        if !self.allocation.strategy.has_retained_batch_data() {
            return 0.0;
        }
        let without = self.environment.storing_nodes() - self.cache_nodes();
        (without as f64 / running.max(1) as f64).min(1.0)
    }

    /// Nodes with partitions of one cache: all, unless scratch volumes fill nodes completely; then
    /// those with space left for a partition.
    fn cache_nodes(&self) -> u64 {
        let nodes = self.environment.storing_nodes();
        let unit = u128::from(self.shape.largest_volume_bytes);
        let node = u128::from(self.environment.largest_node_bytes());
        let keeps_rest = node.checked_rem(unit).is_none_or(|rest| rest > 0);
        let is_spread = matches!(self.allocation.strategy, Strategy::Remote | Strategy::Need);
        if keeps_rest || is_spread {
            return nodes;
        }
        // Volumes that exist at once lie on different nodes, if there are enough nodes.
        let bytes = match self.allocation.strategy.has_retained_batch_data() {
            true => self.shape.batch_bytes,
            false => self.shape.batch_bytes * u128::from(self.allocation.batch_volumes),
        };
        u64::try_from(bytes.div_ceil(unit.max(1)))
            .unwrap_or(nodes)
            .min(nodes)
    }

    fn home_transfer_s(&self, bytes: f64) -> f64 {
        bytes / self.environment.home_bytes_per_s as f64
    }

    /// (C12) Batch data cross once in all, but its readers get it over a node's link.
    fn fetch_s(&self, bytes: f64) -> f64 {
        let local = self.environment.local_bytes_per_s as f64;
        self.home_transfer_s(bytes).max(bytes / local)
    }

    /// (C12) A job's wait for its own node's link if that is slower than the link to home, beyond
    /// the time of the transfer.
    fn own_link_s(&self, bytes: f64) -> f64 {
        self.fetch_s(bytes) - self.home_transfer_s(bytes)
    }

    /// (C10) No computing takes less than no time.
    fn compute_times(&self) -> ComputeTimes {
        ComputeTimes::truncated_at_zero(self.shape.run_s, self.shape.run_s * self.shape.variability)
    }
}

/// (C11) How jobs of a level follow each other on the processors: the last wave has the remaining
/// ones.
#[derive(Debug, Clone, Copy, PartialEq)]
struct LevelWaves {
    /// Waves in which all processors that can run have a job.
    full_waves: f64,
    /// Jobs of the wave that is left, and how many such waves there are: one at most, or a share of
    /// one where several stages have it together.
    last_wave_jobs: u64,
    last_waves: f64,
}

impl LevelWaves {
    /// Of `stages` stages together, for each of them.
    fn for_jobs(width: u64, running: u64, stages: u64) -> Self {
        let (jobs, running, stages) = (width * stages, running.max(1), stages as f64);
        let last = jobs % running;
        Self {
            full_waves: (jobs / running) as f64 / stages,
            last_wave_jobs: last,
            last_waves: if last > 0 { 1.0 / stages } else { 0.0 },
        }
    }

    fn total(self) -> f64 {
        (self.full_waves + self.last_waves).max(1.0)
    }
}

/// Jobs (or whole pipelines) between two barriers.
struct LevelModel {
    jobs: u64,
    /// Seconds until the batch data has arrived from home, once for all, and the link's part of
    /// them.
    fetch_s: f64,
    batch_s: f64,
    /// Seconds of its work in which a job reads batch data.
    read_s: f64,
    /// Seconds that a job takes besides the link to home; in the last wave, where fewer run.
    work_s: f64,
    last_work_s: f64,
    /// Seconds of the link to home that each job needs for itself, and seconds beyond these for
    /// which its node's link has to do with the same bytes.
    demand_s: f64,
    own_link_s: f64,
}

impl LevelModel {
    /// The length of the stage when `running` jobs run at once in `waves`.
    ///
    /// (C1) The cold wave: batch data crosses the link once, whichever sibling reads first. (C4)
    /// All siblings wait for that one transfer before they compute; it overlaps with their own
    /// reading from each other. (C2) The first wave asks for its endpoint data all at once; later
    /// ones meet others at the link as in a closed queueing network, (C11) the last one only those
    /// that are left. (C12) Where a node's link is the slower one, the link to home serves several
    /// at once: a delay remains (Seidmann's approximation of a queue with several servers). The
    /// link's own work is a lower bound.
    fn duration_s(&self, running: u64, waves: LevelWaves) -> f64 {
        let siblings = running as f64;
        let fetch_s = self.fetch_s;
        let work_s = self.work_s;
        let cold_s = fetch_s.max(self.read_s) + (work_s - self.read_s);
        let first_s = cold_s + (siblings * self.demand_s).max(self.demand_s + self.own_link_s);
        let cycle_s = |jobs, work_s: f64| {
            let think_s = work_s + self.own_link_s;
            think_s + expected_response_s(jobs, self.demand_s, think_s)
        };
        let later_s = (waves.full_waves - 1.0).max(0.0) * cycle_s(running, work_s);
        let last_s = waves.last_waves * cycle_s(waves.last_wave_jobs, self.last_work_s);
        let link_s = self.batch_s + self.jobs as f64 * self.demand_s;
        (first_s + later_s + last_s).max(link_s)
    }
}
