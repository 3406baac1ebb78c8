//! Whether scratch volumes of unlike sizes find places on single nodes beside batch data, which
//! are divided among the nodes of one cluster. Exact where a search of bounded length can tell. It
//! knows no strategies.

use super::environment::Environment;
use super::room::Batch;

/// Volumes times nodes, for each cluster that may hold the batch data, up to which places are
/// looked for at all.
const GREEDY_MAX: u64 = 5_000_000;
/// Volumes up to which every way to place them is tried.
const SEARCHED_MAX: u64 = 48;
/// Nodes that searches look at before they give up; some milliseconds.
const LOOKS_MAX: u64 = 2_000_000;

/// One scratch volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Piece {
    pub(super) bytes: u64,
    pub(super) files: u64,
}

/// Volumes of one size, and how many there are; the largest size first.
pub(super) type Pieces = Vec<(Piece, u64)>;

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// There is a place for each.
    Fits,
    /// However they are placed, some find none.
    DoesNotFit,
    /// Too many to try every way, and the obvious ones fail.
    NotKnown,
}

/// What is left of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bin {
    bytes: u64,
    files: u64,
    /// It is in the cluster that holds the batch data.
    is_beside: bool,
}

impl Bin {
    /// Room for batch data, of which a node with a part counts all files.
    fn room(&self, batch: Batch) -> u64 {
        match self.is_beside && self.files >= batch.files {
            true => self.bytes,
            false => 0,
        }
    }

    fn with(mut self, piece: Piece) -> Option<Self> {
        self.bytes = self.bytes.checked_sub(piece.bytes)?;
        self.files = self.files.checked_sub(piece.files)?;
        Some(self)
    }
}

/// Looks for places for all pieces beside batch data in any of the clusters that compute.
pub(super) fn pack(pieces: &Pieces, environment: &Environment, batch: Batch) -> Packing {
    let count = pieces
        .iter()
        .fold(0u64, |sum, piece| sum.saturating_add(piece.1));
    let mut clusters: Vec<&str> = environment
        .first()
        .filter(|class| class.cpus > 0)
        .map(|class| class.cluster.as_str())
        .collect();
    clusters.sort_unstable();
    clusters.dedup();
    if batch.bytes == 0 {
        // It does not matter which of them holds nothing.
        clusters.truncate(1);
    }
    let places = count.saturating_mul(environment.node_count());
    if places.saturating_mul(clusters.len() as u64) > GREEDY_MAX {
        return Packing::NotKnown;
    }
    let one_by_one = |(piece, count): &(Piece, u64)| std::iter::repeat_n(*piece, *count as usize);
    let pieces: Vec<Piece> = pieces.iter().flat_map(one_by_one).collect();
    let (mut found, mut looks_left) = (Packing::DoesNotFit, LOOKS_MAX);
    for cluster in clusters {
        let bins = environment.first().flat_map(|class| {
            let bin = Bin {
                bytes: class.storage_bytes,
                files: class.files,
                is_beside: class.cluster == cluster,
            };
            std::iter::repeat_n(bin, class.count as usize)
        });
        match pack_beside(&pieces, bins.collect(), batch, &mut looks_left) {
            Packing::Fits => return Packing::Fits,
            Packing::NotKnown => found = Packing::NotKnown,
            Packing::DoesNotFit => {}
        }
    }
    found
}

fn pack_beside(pieces: &[Piece], bins: Vec<Bin>, batch: Batch, looks_left: &mut u64) -> Packing {
    let room: u128 = bins.iter().map(|bin| u128::from(bin.room(batch))).sum();
    let Some(spare) = room.checked_sub(batch.bytes) else {
        return Packing::DoesNotFit;
    };
    if fits_greedily(pieces, bins.clone(), batch, spare) {
        return Packing::Fits;
    }
    let bytes: u128 = pieces.iter().map(|piece| u128::from(piece.bytes)).sum();
    let left: u128 = bins.iter().map(|bin| u128::from(bin.bytes)).sum();
    if bytes + batch.bytes > left {
        return Packing::DoesNotFit;
    }
    if pieces.len() as u64 > SEARCHED_MAX {
        return Packing::NotKnown;
    }
    let mut search = Search {
        pieces,
        bins,
        batch,
        looks_left,
    };
    match search.places(0, 0, spare) {
        Some(true) => Packing::Fits,
        Some(false) => Packing::DoesNotFit,
        None => Packing::NotKnown,
    }
}

/// The largest first, each where it costs least room for batch data, then where least is left.
fn fits_greedily(pieces: &[Piece], mut bins: Vec<Bin>, batch: Batch, mut spare: u128) -> bool {
    for piece in pieces {
        let places = bins.iter_mut().filter_map(|bin| {
            let then = bin.with(*piece)?;
            let cost = bin.room(batch) - then.room(batch);
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
struct Search<'s> {
    pieces: &'s [Piece],
    bins: Vec<Bin>,
    batch: Batch,
    looks_left: &'s mut u64,
}

impl Search<'_> {
    /// Whether the pieces from `at` on find places, the first of them on a node from `from` on.
    /// Nothing when that takes too long.
    fn places(&mut self, at: usize, from: usize, spare: u128) -> Option<bool> {
        let Some(&piece) = self.pieces.get(at) else {
            return Some(true);
        };
        for index in from..self.bins.len() {
            self.look_at(1)?;
            let bin = self.bins[index];
            let Some(then) = bin.with(piece) else {
                continue;
            };
            let cost = u128::from(bin.room(self.batch) - then.room(self.batch));
            if cost > spare {
                continue;
            }
            let mut before = self.bins[from..index].iter();
            let equal = before.position(|other| *other == bin);
            self.look_at(equal.unwrap_or(index - from) as u64)?;
            if equal.is_some() {
                continue;
            }
            self.bins[index] = then;
            let is_next_equal = self.pieces.get(at + 1) == Some(&piece);
            let next_from = if is_next_equal { index } else { 0 };
            let found = self.places(at + 1, next_from, spare - cost);
            self.bins[index] = bin;
            if found != Some(false) {
                return found;
            }
        }
        Some(false)
    }

    /// Nothing when that is more than may be looked at.
    fn look_at(&mut self, bins: u64) -> Option<()> {
        *self.looks_left = self.looks_left.checked_sub(bins)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::NodeClass;

    fn packed(classes: Vec<NodeClass>, pieces: &[(u64, u64)], batch_bytes: u128) -> Packing {
        let environment = Environment {
            nodes: classes,
            home_bytes_per_s: 1,
            local_bytes_per_s: 1,
            mtbf_s: None,
            restart_s: 60,
        };
        let mut pieces: Pieces = pieces
            .iter()
            .map(|&(bytes, count)| (Piece { bytes, files: 1 }, count))
            .collect();
        pieces.sort_unstable_by(|a, b| b.cmp(a));
        let batch = Batch {
            bytes: batch_bytes,
            files: 1,
        };
        pack(&pieces, &environment, batch)
    }

    /// Each of ten nodes has room for three of 31 volumes, and a thousand others, all unlike, for
    /// none. Every compare of two nodes was for nothing, and took minutes.
    #[test]
    fn a_search_among_unlike_nodes_looks_at_no_more_than_it_may() {
        let small = (0..990).map(|at| NodeClass::new(1, 1, 1_000 + at));
        let large = (0..10).map(|at| NodeClass::new(1, 1, 100_000 + at));
        let pieces: Vec<(u64, u64)> = (0..31).map(|at| (33_100 + at, 1)).collect();
        assert_eq!(
            packed(small.chain(large).collect(), &pieces, 0),
            Packing::NotKnown
        );
    }

    #[test]
    fn clusters_that_could_all_hold_the_batch_data_count_for_each() {
        let class = |at: u64| NodeClass {
            cluster: format!("c{at}"),
            ..NodeClass::new(1, 1, 100)
        };
        let nodes = || (0..3_000).map(class).collect::<Vec<_>>();
        assert_eq!(packed(nodes(), &[(60, 10)], 1), Packing::NotKnown);
        assert_eq!(packed(nodes(), &[(60, 10)], 0), Packing::Fits);
        assert_eq!(packed(nodes(), &[(60, 3_001)], 0), Packing::NotKnown);
    }
}
