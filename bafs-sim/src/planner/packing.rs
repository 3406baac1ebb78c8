//! Whether scratch volumes of unlike sizes find places on single nodes beside batch data, which are
//! divided among the nodes of one cluster. Exact if a search of bounded length finds an answer. It
//! knows no strategies.

use super::batch_storage::BatchData;
use super::environment::Environment;
use super::scratch_sizes::{ScratchSize, ScratchSizes};

/// Volumes times nodes, for each cluster that may hold the batch data, up to which places are
/// looked for at all.
const GREEDY_STEPS_MAX: u64 = 5_000_000;
/// Volumes up to which every way to place them is tried.
const EXHAUSTIVE_VOLUMES_MAX: u64 = 48;
/// Search nodes before the search stops; some milliseconds.
const SEARCH_STEPS_MAX: u64 = 2_000_000;

/// The result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PackingResult {
    /// There is a place for each.
    Fits,
    /// However they are placed, some find none.
    DoesNotFit,
    /// Too many to try every way, and the obvious ones fail.
    Unknown,
}

/// Free space of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bin {
    bytes: u64,
    files: u64,
    /// It is in the cluster that holds the batch data.
    is_in_batch_cluster: bool,
}

impl Bin {
    /// Room for batch data, of which a node with a part counts all files.
    fn batch_room(&self, batch: BatchData) -> u64 {
        match self.is_in_batch_cluster && self.files >= batch.files {
            true => self.bytes,
            false => 0,
        }
    }

    fn with_volume(mut self, piece: ScratchSize) -> Option<Self> {
        self.bytes = self.bytes.checked_sub(piece.bytes)?;
        self.files = self.files.checked_sub(piece.files)?;
        Some(self)
    }
}

/// Looks for places for all pieces beside batch data in any of the clusters that compute.
pub(super) fn pack_volumes(
    pieces: &ScratchSizes,
    environment: &Environment,
    batch: BatchData,
) -> PackingResult {
    let count = pieces
        .iter()
        .fold(0u64, |sum, piece| sum.saturating_add(piece.1));
    let mut clusters: Vec<&str> = environment
        .initial_nodes()
        .filter(|class| class.cpus > 0)
        .map(|class| class.cluster.as_str())
        .collect();
    clusters.sort_unstable();
    clusters.dedup();
    if batch.bytes == 0 {
        // Empty nodes are interchangeable.
        clusters.truncate(1);
    }
    let places = count.saturating_mul(environment.node_count());
    if places.saturating_mul(clusters.len() as u64) > GREEDY_STEPS_MAX {
        return PackingResult::Unknown;
    }
    let one_by_one =
        |(piece, count): &(ScratchSize, u64)| std::iter::repeat_n(*piece, *count as usize);
    let pieces: Vec<ScratchSize> = pieces.iter().flat_map(one_by_one).collect();
    let (mut found, mut looks_left) = (PackingResult::DoesNotFit, SEARCH_STEPS_MAX);
    for cluster in clusters {
        let bins = environment.initial_nodes().flat_map(|class| {
            let bin = Bin {
                bytes: class.storage_bytes,
                files: class.files,
                is_in_batch_cluster: class.cluster == cluster,
            };
            std::iter::repeat_n(bin, class.count as usize)
        });
        match pack_beside_batch(&pieces, bins.collect(), batch, &mut looks_left) {
            PackingResult::Fits => return PackingResult::Fits,
            PackingResult::Unknown => found = PackingResult::Unknown,
            PackingResult::DoesNotFit => {}
        }
    }
    found
}

fn pack_beside_batch(
    pieces: &[ScratchSize],
    bins: Vec<Bin>,
    batch: BatchData,
    looks_left: &mut u64,
) -> PackingResult {
    let room: u128 = bins
        .iter()
        .map(|bin| u128::from(bin.batch_room(batch)))
        .sum();
    let Some(spare) = room.checked_sub(batch.bytes) else {
        return PackingResult::DoesNotFit;
    };
    if can_pack_greedily(pieces, bins.clone(), batch, spare) {
        return PackingResult::Fits;
    }
    let bytes: u128 = pieces.iter().map(|piece| u128::from(piece.bytes)).sum();
    let left: u128 = bins.iter().map(|bin| u128::from(bin.bytes)).sum();
    if bytes + batch.bytes > left {
        return PackingResult::DoesNotFit;
    }
    if pieces.len() as u64 > EXHAUSTIVE_VOLUMES_MAX {
        return PackingResult::Unknown;
    }
    let mut search = PackingSearch {
        pieces,
        bins,
        batch,
        steps_left: looks_left,
    };
    match search.search_from(0, 0, spare) {
        Some(true) => PackingResult::Fits,
        Some(false) => PackingResult::DoesNotFit,
        None => PackingResult::Unknown,
    }
}

/// The largest first, each where it costs least room for batch data, then where least is left.
fn can_pack_greedily(
    pieces: &[ScratchSize],
    mut bins: Vec<Bin>,
    batch: BatchData,
    mut spare: u128,
) -> bool {
    for piece in pieces {
        let places = bins.iter_mut().filter_map(|bin| {
            let then = bin.with_volume(*piece)?;
            let cost = bin.batch_room(batch) - then.batch_room(batch);
            (u128::from(cost) <= spare).then_some((cost, then.bytes, bin, then))
        });
        let Some((cost, _, bin, then)) = places.min_by_key(|place| (place.0, place.1)) else {
            return false;
        };
        *bin = then;
        spare -= u128::from(cost);
    }
    true
}

/// Every way to place the pieces, but for those that differ only in which of equal volumes, or of
/// equal nodes, is which.
struct PackingSearch<'s> {
    pieces: &'s [ScratchSize],
    bins: Vec<Bin>,
    batch: BatchData,
    steps_left: &'s mut u64,
}

impl PackingSearch<'_> {
    /// Whether the pieces from `at` on find places, the first of them on a node from `from` on.
    /// `None` if the search takes too long.
    fn search_from(&mut self, at: usize, from: usize, spare: u128) -> Option<bool> {
        let Some(&piece) = self.pieces.get(at) else {
            return Some(true);
        };
        for index in from..self.bins.len() {
            self.spend_steps(1)?;
            let bin = self.bins[index];
            let Some(then) = bin.with_volume(piece) else {
                continue;
            };
            let cost = u128::from(bin.batch_room(self.batch) - then.batch_room(self.batch));
            if cost > spare {
                continue;
            }
            let mut before = self.bins[from..index].iter();
            let equal = before.position(|other| *other == bin);
            self.spend_steps(equal.unwrap_or(index - from) as u64)?;
            if equal.is_some() {
                continue;
            }
            self.bins[index] = then;
            let is_next_equal = self.pieces.get(at + 1) == Some(&piece);
            let next_from = if is_next_equal { index } else { 0 };
            let found = self.search_from(at + 1, next_from, spare - cost);
            self.bins[index] = bin;
            if found != Some(false) {
                return found;
            }
        }
        Some(false)
    }

    /// `None` beyond the search limit.
    fn spend_steps(&mut self, bins: u64) -> Option<()> {
        *self.steps_left = self.steps_left.checked_sub(bins)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::NodeClass;

    fn pack_sizes(
        classes: Vec<NodeClass>,
        pieces: &[(u64, u64)],
        batch_bytes: u128,
    ) -> PackingResult {
        let environment = Environment {
            nodes: classes,
            home_bytes_per_s: 1,
            local_bytes_per_s: 1,
            mtbf_s: None,
            restart_s: 60,
        };
        let mut pieces: ScratchSizes = pieces
            .iter()
            .map(|&(bytes, count)| (ScratchSize { bytes, files: 1 }, count))
            .collect();
        pieces.sort_unstable_by(|a, b| b.cmp(a));
        let batch = BatchData {
            bytes: batch_bytes,
            files: 1,
        };
        pack_volumes(&pieces, &environment, batch)
    }

    /// Each of ten nodes has room for three of 31 volumes, and a thousand others, all unlike, for
    /// none. Every compare of two nodes was for nothing, and took minutes.
    #[test]
    fn search_among_unlike_nodes_is_bounded() {
        let small = (0..990).map(|at| NodeClass::new(1, 1, 1_000 + at));
        let large = (0..10).map(|at| NodeClass::new(1, 1, 100_000 + at));
        let pieces: Vec<(u64, u64)> = (0..31).map(|at| (33_100 + at, 1)).collect();
        assert_eq!(
            pack_sizes(small.chain(large).collect(), &pieces, 0),
            PackingResult::Unknown
        );
    }

    #[test]
    fn candidate_clusters_count_towards_the_search_bound() {
        let class = |at: u64| NodeClass {
            cluster: format!("c{at}"),
            ..NodeClass::new(1, 1, 100)
        };
        let nodes = || (0..3_000).map(class).collect::<Vec<_>>();
        assert_eq!(pack_sizes(nodes(), &[(60, 10)], 1), PackingResult::Unknown);
        assert_eq!(pack_sizes(nodes(), &[(60, 10)], 0), PackingResult::Fits);
        assert_eq!(
            pack_sizes(nodes(), &[(60, 3_001)], 0),
            PackingResult::Unknown
        );
    }
}
