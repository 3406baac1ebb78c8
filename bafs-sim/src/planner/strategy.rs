//! The allocation strategies (thesis §4.2.6, Table 4.2): the exact condition of each, and its
//! consequences for the order of jobs. It predicts no time and does not choose.

use bafs_sched::{AllocationRules, JobStartOrder, Strategy};
use serde::{Deserialize, Serialize};

use super::batch_storage::BatchData;
use super::environment::Environment;
use super::packing::{PackingResult, pack_volumes};
use super::shape::Shape;

/// In which order jobs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traversal {
    /// As they become ready.
    Any,
    /// A whole stage before the next.
    BreadthFirst,
    /// A whole pipeline before the next.
    DepthFirst,
    /// Stage after stage for a part of the pipelines, then the next part.
    PartialSlices,
}

/// Why a strategy is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shortage {
    /// All nodes together lack so many bytes.
    Total {
        /// Bytes that are missing.
        missing_bytes: u128,
    },
    /// A scratch volume lies on one node, and the largest node lacks so many bytes for it.
    Node {
        /// Bytes that are missing.
        missing_bytes: u128,
    },
    /// The nodes of one cluster share batch data. The nodes of the largest cluster with processors
    /// (and space for so many files) lack so many bytes.
    Cluster {
        /// Bytes that are missing.
        missing_bytes: u128,
    },
    /// The bytes suffice for batch data, but no cluster with processors has space for so many files
    /// on each node with a partition.
    Files {
        /// Files of the batch data that exist at once.
        batch_files: u64,
    },
    /// The bytes suffice, but not on the same nodes: so many scratch volumes fit nowhere, at least
    /// one if sizes differ.
    Placement {
        /// Scratch volumes.
        missing_volumes: u128,
    },
}

/// A strategy in an environment: whether it is possible, and its consequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// The strategy.
    pub strategy: Strategy,
    /// In which order jobs run.
    pub traversal: Traversal,
    /// The least storage that it needs.
    pub required_bytes: u128,
    /// The shortage; `None` if the strategy is possible.
    pub shortage: Option<Shortage>,
    /// Whether that is exact. Otherwise bytes are only added up, of the largest pipeline for each,
    /// or nodes may lack space for files. Then a shortage is an upper bound, and a possible
    /// strategy may lack space on single nodes.
    pub is_exact: bool,
    /// Pipelines whose data allow them to run at once, whatever processors there are; 0 when the
    /// strategy is not possible.
    pub concurrency: u64,
    /// Batch volumes held at once; 0 when the strategy is not possible.
    pub batch_volumes: u64,
    /// Times that pipelines wait for all others of their part.
    pub barriers: u64,
    /// Batch volumes that are fetched from home again.
    pub refetches: u64,
    /// Parts that run one after the other.
    pub cycles: u64,
    /// Pipelines of each part but the last.
    pub part_width: u64,
    /// Pipelines of the last part.
    pub last_part_width: u64,
}

/// What a strategy needs of an environment, and what it allocates there.
pub trait StrategyAllocation {
    /// The least storage, in bytes, with which the strategy is possible (Table 4.2).
    fn required_bytes(self, shape: &Shape) -> u128;

    /// How the strategy would run `shape` in `environment`, or what it lacks.
    fn plan_allocation(self, shape: &Shape, environment: &Environment) -> Allocation;
}

impl StrategyAllocation for Strategy {
    fn required_bytes(self, shape: &Shape) -> u128 {
        let width = u128::from(shape.width);
        match self {
            Self::All => shape.batch_total_bytes + shape.retained_by_all(),
            Self::AllPrivate => shape.batch_bytes + shape.retained_by_all(),
            Self::AllBatch => shape.batch_total_bytes + shape.running_bytes,
            // A running pipeline holds the data of a waiting one, and its output as well.
            Self::Slice => {
                shape.batch_bytes + shape.waiting_bytes * width + shape.running_extra_bytes()
            }
            Self::Minimal | Self::Need => shape.batch_bytes + shape.running_bytes,
            Self::Remote => 0,
        }
    }

    fn plan_allocation(self, shape: &Shape, environment: &Environment) -> Allocation {
        let environment = &*environment.usable_nodes(shape);
        let required_bytes = self.required_bytes(shape);
        let (shortage, is_exact) = find_exact_shortage(self, shape, environment);
        // Jobs go to every cluster that can hold what is read first, wherever the rest must lie.
        let is_divided = batch_data(self, shape).bytes > 0 && environment.has_clusters();
        let is_by_files = match shortage {
            None | Some(Shortage::Placement { .. }) => !shape.has_room_for_files(environment),
            // These are so whatever files there is room for, or because of them.
            Some(_) => false,
        };
        // Departing nodes may take space that is needed to the end.
        let is_leaving = environment
            .initial_nodes()
            .any(|class| class.departure_s.is_some());
        let is_doubtful = (is_divided || is_leaving) && shortage.is_none() || is_by_files;
        let is_certain = is_exact && (self == Self::Remote || !is_doubtful);
        let mut allocation = Allocation {
            strategy: self,
            traversal: traversal_of(self),
            required_bytes,
            shortage,
            is_exact: is_certain,
            concurrency: 0,
            batch_volumes: 0,
            barriers: 0,
            refetches: 0,
            cycles: 0,
            part_width: 0,
            last_part_width: 0,
        };
        if shortage.is_none() {
            allocation.set_concurrency(shape, environment);
        }
        allocation
    }
}

/// Scratch volumes among these, in bytes.
fn scratch_bytes(strategy: Strategy, shape: &Shape) -> u128 {
    let width = u128::from(shape.width);
    match strategy {
        Strategy::All | Strategy::AllPrivate => shape.retained_by_all(),
        Strategy::AllBatch | Strategy::Minimal | Strategy::Need => shape.running_bytes,
        Strategy::Slice => shape.waiting_bytes * width + shape.running_extra_bytes(),
        Strategy::Remote => 0,
    }
}

/// Batch data among these.
fn batch_data(strategy: Strategy, shape: &Shape) -> BatchData {
    match strategy {
        Strategy::All | Strategy::AllBatch => BatchData {
            bytes: shape.batch_total_bytes,
            files: shape.batch_total_files,
        },
        _ => shape.batch_data_of_levels(1),
    }
}

/// What the strategy lacks in `environment`, nothing when it is possible, and whether that is
/// exact.
fn find_exact_shortage(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
) -> (Option<Shortage>, bool) {
    let shortage = find_shortage(strategy, shape, environment);
    let holds_all = matches!(strategy, Strategy::All | Strategy::AllPrivate);
    match (strategy, shortage) {
        (Strategy::Remote, _) => (shortage, true),
        (Strategy::Need, _) => (shortage, false),
        _ if shape.has_equal_volumes && (holds_all || shape.scratch.is_empty()) => (shortage, true),
        _ if !holds_all || shape.scratch.is_empty() => (shortage, false),
        (_, Some(_)) => (shortage, true),
        _ => match pack_volumes(&shape.scratch, environment, batch_data(strategy, shape)) {
            PackingResult::Fits => (None, true),
            PackingResult::DoesNotFit => (Some(Shortage::Placement { missing_volumes: 1 }), true),
            PackingResult::Unknown => (None, false),
        },
    }
}

/// What the strategy lacks in `environment` when bytes are added up where scratch volumes have
/// unlike sizes; nothing when it is possible.
fn find_shortage(strategy: Strategy, shape: &Shape, environment: &Environment) -> Option<Shortage> {
    if strategy == Strategy::Remote {
        return None;
    }
    let (needed, offered) = (strategy.required_bytes(shape), environment.storage_bytes());
    if needed > offered {
        let missing_bytes = needed - offered;
        return Some(Shortage::Total { missing_bytes });
    }
    let (on_one_node, largest) = match strategy {
        // Volumes lie where their jobs run, which is where their batch data are.
        Strategy::Need => {
            let largest =
                environment.largest_node_beside(batch_data(strategy, shape), shape.running_bytes);
            (shape.running_bytes, largest)
        }
        _ => {
            let volume = u128::from(shape.largest_volume_bytes);
            (volume, environment.largest_node_bytes())
        }
    };
    let largest = u128::from(largest);
    if on_one_node > largest {
        let missing_bytes = on_one_node - largest;
        return Some(Shortage::Node { missing_bytes });
    }
    let scratch = scratch_bytes(strategy, shape);
    match environment.scratch_room_beside(shape, batch_data(strategy, shape)) {
        Err(missing_bytes) => Some(find_cluster_shortage(
            strategy,
            shape,
            environment,
            missing_bytes,
        )),
        Ok(room) if room >= scratch => None,
        Ok(room) => {
            let volume = u128::from(shape.largest_volume_bytes.max(1));
            let missing_volumes = (scratch - room).div_ceil(volume);
            Some(Shortage::Placement { missing_volumes })
        }
    }
}

/// What is lacking where no cluster holds the batch data, and the largest one lacks so many
/// bytes with room for their files.
fn find_cluster_shortage(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
    missing_bytes: u128,
) -> Shortage {
    let mut endless = environment.clone();
    for class in &mut endless.nodes {
        class.files = u64::MAX;
    }
    let batch = batch_data(strategy, shape);
    match endless.scratch_room_beside(shape, batch) {
        Ok(_) => Shortage::Files {
            batch_files: batch.files,
        },
        Err(_) => Shortage::Cluster { missing_bytes },
    }
}

fn traversal_of(strategy: Strategy) -> Traversal {
    match strategy {
        Strategy::All | Strategy::Remote | Strategy::Need => Traversal::Any,
        Strategy::AllPrivate | Strategy::Slice => Traversal::BreadthFirst,
        Strategy::AllBatch => Traversal::DepthFirst,
        Strategy::Minimal => Traversal::PartialSlices,
    }
}

/// Pipelines whose data fit at once (v_exec of §4.4); not capped by the width.
pub(super) fn count_fitting_pipelines(
    strategy: Strategy,
    shape: &Shape,
    environment: &Environment,
) -> u128 {
    let width = u128::from(shape.width);
    let room = || {
        let room = environment.scratch_room_beside(shape, batch_data(strategy, shape));
        room.unwrap_or(0)
    };
    match strategy {
        Strategy::All | Strategy::AllPrivate | Strategy::Remote => width,
        Strategy::Need if find_shortage(Strategy::All, shape, environment).is_none() => width,
        Strategy::AllBatch | Strategy::Minimal | Strategy::Need => {
            count_parts(room(), shape.running_bytes, width)
        }
        Strategy::Slice => {
            let free = room().saturating_sub(shape.waiting_bytes * width);
            count_parts(free, shape.running_extra_bytes(), width)
        }
    }
}

impl Shape {
    /// Whether each node that holds volumes has room for all files at once: else the parts of batch
    /// data, which count all their files on each node, may leave nodes with bytes, but too few
    /// files.
    fn has_room_for_files(&self, environment: &Environment) -> bool {
        let files = self.total_files();
        let mut storing = environment
            .initial_nodes()
            .filter(|it| it.storage_bytes > 0);
        self.batch_total_bytes == 0 || storing.all(|class| u128::from(class.files) >= files)
    }

    /// The bytes that a pipeline needs to run, beyond its data while it waits.
    fn running_extra_bytes(&self) -> u128 {
        self.running_bytes - self.waiting_bytes
    }

    /// Batch data of so many of the largest stages: no more than there are, as several may read the
    /// same.
    fn batch_data_of_levels(&self, stages: u64) -> BatchData {
        let files = self.batch_files.saturating_mul(stages);
        BatchData {
            bytes: (self.batch_bytes * u128::from(stages)).min(self.batch_total_bytes),
            files: files.min(self.batch_total_files),
        }
    }
}

impl Allocation {
    /// Whether the strategy is possible.
    pub fn is_possible(&self) -> bool {
        self.shortage.is_none()
    }

    /// Whether it is possible, and not the user's to choose: remote I/O is.
    pub fn is_planned(&self) -> bool {
        self.is_possible() && self.strategy != Strategy::Remote
    }

    /// The rules that make the scheduler allocate so; none where it needs none. They count volumes
    /// where strategies count stages, and what holds all batch data has nothing to count. `None`
    /// also for an impossible strategy.
    pub fn allocation_rules(&self, shape: &Shape) -> Option<AllocationRules> {
        if self.strategy == Strategy::Need || !self.is_possible() {
            return None;
        }
        let order = match self.traversal {
            Traversal::Any => JobStartOrder::Need,
            Traversal::DepthFirst => JobStartOrder::DepthFirst,
            Traversal::BreadthFirst | Traversal::PartialSlices => JobStartOrder::BreadthFirst,
        };
        // Slice and AllPrivate hold a private volume of each pipeline; the remaining space limits
        // the running pipelines.
        let is_of_all = matches!(self.strategy, Strategy::Slice | Strategy::AllPrivate);
        let pipelines_max = match is_of_all || self.concurrency >= shape.width {
            true => u64::MAX,
            false => self.concurrency.saturating_mul(shape.scheduler_pipelines),
        };
        Some(AllocationRules {
            order,
            pipelines_max,
            has_sequential_parts: self.traversal == Traversal::PartialSlices,
            batch_volumes_max: match self.strategy {
                Strategy::All | Strategy::AllBatch | Strategy::Remote => u64::MAX,
                _ => self.batch_volumes.saturating_mul(shape.level_volumes),
            },
        })
    }

    /// Pipelines that run at once, with the processors that there are.
    pub fn running_pipelines(&self, shape: &Shape, environment: &Environment) -> u64 {
        self.concurrency
            .min(environment.concurrent_jobs(shape))
            .min(self.part_width)
    }

    fn set_concurrency(&mut self, shape: &Shape, environment: &Environment) {
        let width = u128::from(shape.width);
        let concurrency = count_fitting_pipelines(self.strategy, shape, environment).min(width);
        self.concurrency = concurrency as u64;
        self.part_width = match self.strategy {
            Strategy::Minimal => self.concurrency,
            _ => shape.width,
        };
        // A finished workload has nothing to divide.
        self.cycles = shape.width.div_ceil(self.part_width.max(1));
        let before = self.cycles.saturating_sub(1);
        self.last_part_width = shape.width - before * self.part_width;
        self.batch_volumes = self.batch_slots(shape, environment);
        if !matches!(
            self.traversal,
            Traversal::BreadthFirst | Traversal::PartialSlices
        ) {
            return;
        }
        let segments = self.segments(shape.depth);
        self.barriers = (self.cycles * segments).saturating_sub(1);
        self.refetches = before * (shape.batch_levels() - self.retained_levels(shape));
    }

    /// Stretches between barriers in one part.
    pub(super) fn segments(&self, depth: u64) -> u64 {
        depth.div_ceil(self.batch_volumes.max(1))
    }

    /// Batch volumes that the next part finds: all if all fit. Otherwise none, since it starts with
    /// the stage whose batch volume left first.
    pub(super) fn retained_levels(&self, shape: &Shape) -> u64 {
        let stages = shape.batch_levels();
        if self.batch_volumes >= stages {
            stages
        } else {
            0
        }
    }

    /// Batch volumes that fit beside the private volumes of a part and the running pipelines
    /// (v_batch of §4.4; C8). Storage for pipelines beyond the processors is better spent on it.
    fn batch_slots(&self, shape: &Shape, environment: &Environment) -> u64 {
        let (running, width) = (
            u128::from(self.running_pipelines(shape, environment)),
            u128::from(self.part_width),
        );
        let private_bytes = match self.strategy {
            Strategy::Remote => return 0,
            Strategy::All | Strategy::AllBatch | Strategy::Need => return shape.depth,
            Strategy::AllPrivate => shape.retained_by_all(),
            Strategy::Slice | Strategy::Minimal => {
                shape.waiting_bytes * width + shape.running_extra_bytes() * running
            }
        };
        let fits = |stages: u64| {
            let room = environment.scratch_room_beside(shape, shape.batch_data_of_levels(stages));
            room.is_ok_and(|room| room >= private_bytes)
        };
        let (mut most, mut too_many) = (1, shape.depth + 1);
        while most + 1 < too_many {
            let middle = most + (too_many - most) / 2;
            match fits(middle) {
                true => most = middle,
                false => too_many = middle,
            }
        }
        most
    }
}

impl Shape {
    /// Stages that read batch data of their own.
    fn batch_levels(&self) -> u64 {
        if self.batch_total_bytes == 0 {
            0
        } else {
            self.depth
        }
    }
}

/// How many parts of `part_bytes` fit; `most` when they take no space.
fn count_parts(bytes: u128, part_bytes: u128, most: u128) -> u128 {
    bytes.checked_div(part_bytes).unwrap_or(most)
}
