//! Which server is primary for each extent of a source. Moves no byte, knows no network.
//!
//! Blocks are placed by extents of up to 1 MiB, so that a scan asks one server for many at once.
//! Rendezvous hashing alone would place few large extents unevenly: of 16 servers with 16 extents
//! each on average, one has about 24. So no server is given more than its share and a little, nor
//! more than it can keep while there is room elsewhere; what finds no room at its first choice
//! goes to its next one (hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018). When
//! there are very many extents their number evens them out, and the table is left out.

use bafs_proto::ids::{FileIndex, ServerId};

use super::blocks::ALLOCATION_UNIT_BYTES;
use super::rendezvous::{Candidate, best_candidate, rank};

/// Most bytes of a source file that have one primary, unless a block is larger.
const EXTENT_BYTES_MAX: u64 = 1 << 20;

/// A small source is cut into about so many extents at least, for all servers to have some.
const EXTENTS_MIN: u64 = 256;

/// Most scores (extents by servers) that are computed for a table: about a second's work.
const SCORES_MAX: u64 = 1 << 21;

/// A server takes this part more than its share before the next one is asked.
const SURPLUS_DIVISOR: u64 = 16;

/// A part of a file that has one primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    /// The file.
    pub(crate) file: FileIndex,
    /// Which part of it, from 0.
    pub(crate) number: u64,
}

/// Where the extents of a source are.
#[derive(Debug, Default)]
pub(crate) struct Placement {
    candidates: Vec<Candidate>,
    table: Option<OwnerTable>,
}

#[derive(Debug)]
struct OwnerTable {
    /// For each file its first place in `owners`.
    file_starts: Vec<u32>,
    /// Place of the primary among the candidates.
    owners: Vec<u16>,
}

/// A source as far as placement goes: the name of the cache, and path and size of each file in
/// the order of the manifest (size 0 for what has no blocks).
#[derive(Debug)]
pub(crate) struct PlacementInput<'a> {
    pub(crate) cache: &'a str,
    pub(crate) files: Vec<(&'a str, u64)>,
    pub(crate) extent_bytes: u64,
}

/// Bytes of a file that have one primary. It depends on the source only, not on the servers: or
/// whoever comes or goes would move everything.
pub(crate) fn extent_bytes(source_bytes: u64, block_bytes: u32) -> u64 {
    let wanted = (source_bytes / EXTENTS_MIN).clamp(1, EXTENT_BYTES_MAX);
    // Powers of two, as blocks are.
    (1 << wanted.ilog2()).max(u64::from(block_bytes))
}

impl Placement {
    /// Places all extents; `candidates` in an order that all servers agree on.
    pub(crate) fn compute(places: &PlacementInput<'_>, candidates: Vec<Candidate>) -> Self {
        let extents = |size: u64| size.div_ceil(places.extent_bytes);
        let all = places
            .files
            .iter()
            .fold(0u64, |sum, (_, size)| sum.saturating_add(extents(*size)));
        let scores = all.saturating_mul(candidates.len() as u64);
        let small = scores <= SCORES_MAX && candidates.len() <= usize::from(u16::MAX);
        let table = (small && candidates.len() > 1).then(|| build_table(places, &candidates));
        Self { candidates, table }
    }

    /// Whether these are the servers that it was made for.
    pub(crate) fn is_for(&self, candidates: &[Candidate]) -> bool {
        self.candidates == candidates
    }

    /// The servers that it was made for.
    pub(crate) fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The primary of an extent; `None` when there is no server at all. `key` names the extent.
    pub(crate) fn owner(&self, extent: Extent, key: &[&[u8]]) -> Option<ServerId> {
        let tabled = self.table.as_ref().and_then(|table| {
            let start = *table.file_starts.get(extent.file.0 as usize)?;
            let place = usize::try_from(u64::from(start) + extent.number).ok()?;
            table.owners.get(place)
        });
        let place = match tabled {
            Some(place) => usize::from(*place),
            None => best_candidate(key, &self.candidates, |_| true)?,
        };
        Some(self.candidates[place].server)
    }

    /// All servers for an extent: its primary first, then who follows if that one is away.
    pub(crate) fn ranked_servers(&self, extent: Extent, key: &[&[u8]]) -> Vec<ServerId> {
        let mut ranked = rank(key, &self.candidates);
        if let Some(owner) = self.owner(extent, key) {
            ranked.retain(|server| *server != owner);
            ranked.insert(0, owner);
        }
        ranked
    }
}

fn build_table(places: &PlacementInput<'_>, candidates: &[Candidate]) -> OwnerTable {
    let charged = |size: u64| size.next_multiple_of(ALLOCATION_UNIT_BYTES);
    let total: u128 = places
        .files
        .iter()
        .map(|(_, size)| u128::from(charged(*size)))
        .sum();
    let weights: u128 = candidates.iter().map(|c| u128::from(c.weight.max(1))).sum();
    let bounds: Vec<u128> = candidates
        .iter()
        .map(|candidate| {
            let weight = u128::from(candidate.weight.max(1));
            let share = total * weight / weights;
            let extent = u128::from(places.extent_bytes);
            if total >= weights {
                return share + extent;
            }
            (share + extent.max(share / u128::from(SURPLUS_DIVISOR))).min(weight)
        })
        .collect();
    let mut loads = vec![0u128; candidates.len()];
    let mut table = OwnerTable {
        file_starts: Vec::with_capacity(places.files.len()),
        owners: Vec::new(),
    };
    for (path, size) in &places.files {
        table.file_starts.push(table.owners.len() as u32);
        for number in 0..size.div_ceil(places.extent_bytes) {
            let left = size - number * places.extent_bytes;
            let bytes = u128::from(charged(left.min(places.extent_bytes)));
            let number = number.to_le_bytes();
            let key: [&[u8]; 3] = [places.cache.as_bytes(), path.as_bytes(), &number];
            let place = best_candidate(&key, candidates, |n| loads[n] + bytes <= bounds[n]);
            let place = place.unwrap_or_else(|| least_loaded(&loads, &bounds));
            loads[place] += bytes;
            table.owners.push(place as u16);
        }
    }
    table
}

/// Where the least is over its bound, or the most is left.
fn least_loaded(loads: &[u128], bounds: &[u128]) -> usize {
    let room = |n: &usize| bounds[*n] as i128 - loads[*n] as i128;
    (0..loads.len())
        .max_by_key(|n| (room(n), usize::MAX - n))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn candidates(weights: &[u64]) -> Vec<Candidate> {
        let servers = (1..).map(|n| ServerId(n * 7919));
        servers
            .zip(weights)
            .map(|(server, &weight)| Candidate { server, weight })
            .collect()
    }

    fn places<'a>(files: &[(&'a str, u64)]) -> PlacementInput<'a> {
        PlacementInput {
            cache: "nr",
            files: files.to_vec(),
            extent_bytes: EXTENT_BYTES_MAX,
        }
    }

    fn owners(places: &PlacementInput<'_>, placement: &Placement) -> Vec<(ServerId, u64)> {
        let mut owners = Vec::new();
        for (n, (path, size)) in places.files.iter().enumerate() {
            for number in 0..size.div_ceil(EXTENT_BYTES_MAX) {
                let extent = Extent {
                    file: FileIndex(n as u32),
                    number,
                };
                let bytes = number.to_le_bytes();
                let key: [&[u8]; 3] = [b"nr", path.as_bytes(), &bytes];
                let owner = placement.owner(extent, &key).expect("there are servers");
                assert_eq!(placement.ranked_servers(extent, &key)[0], owner);
                owners.push((
                    owner,
                    (size - number * EXTENT_BYTES_MAX).min(EXTENT_BYTES_MAX),
                ));
            }
        }
        owners
    }

    fn load(owners: &[(ServerId, u64)], server: ServerId) -> u64 {
        let of_server = owners.iter().filter(|(owner, _)| *owner == server);
        of_server.map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn few_extents_fill_equal_servers_evenly() {
        let places = places(&[("nr.psq", 200 * MIB), ("nr.phr", 56 * MIB)]);
        let all = candidates(&[64 * MIB; 16]);
        let placement = Placement::compute(&places, all.clone());
        let owners = owners(&places, &placement);
        for candidate in all {
            let held = load(&owners, candidate.server) / MIB;
            assert!((12..=17).contains(&held), "{held} of 16 MiB");
        }
    }

    #[test]
    fn a_fitting_source_overflows_no_server() {
        for (sizes, weights) in [
            (vec![("a", 249 * MIB)], vec![16 * MIB; 16]),
            (
                vec![("a", 100 * MIB + 5), ("b", 3), ("c", 23 * MIB + 77)],
                vec![16 * MIB, 32 * MIB, 48 * MIB, 32 * MIB],
            ),
        ] {
            let places = places(&sizes);
            let all = candidates(&weights);
            let owners = owners(&places, &Placement::compute(&places, all.clone()));
            for candidate in all {
                assert!(load(&owners, candidate.server) <= candidate.weight);
            }
        }
    }

    #[test]
    fn an_oversized_source_overflows_all_servers_equally() {
        let places = places(&[("a", 96 * MIB)]);
        let all = candidates(&[16 * MIB, 16 * MIB, 32 * MIB]);
        let owners = owners(&places, &Placement::compute(&places, all.clone()));
        for candidate in all {
            let expected = candidate.weight * 3 / 2;
            let held = load(&owners, candidate.server);
            assert!(held.abs_diff(expected) <= 2 * MIB, "{held}, not {expected}");
        }
    }

    #[test]
    fn a_joining_server_moves_little_beyond_its_share() {
        let places = places(&[("nr.psq", 256 * MIB)]);
        for servers in [4usize, 8, 15] {
            let more = candidates(&vec![64 * MIB; servers + 1]);
            let before = owners(
                &places,
                &Placement::compute(&places, more[..servers].to_vec()),
            );
            let after = owners(&places, &Placement::compute(&places, more));
            let moved = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            let share = 256 / (servers + 1);
            assert!(moved <= 2 * share + 8, "{servers}: {moved}, share {share}");
        }
    }

    #[test]
    fn extents_are_whole_blocks_scaled_with_the_source() {
        let kib = 1 << 10;
        assert_eq!(extent_bytes(0, 65_536), 64 * kib);
        assert_eq!(extent_bytes(64 * MIB, 65_536), 256 * kib);
        assert_eq!(extent_bytes(100 * MIB, 4_096), 256 * kib);
        assert_eq!(extent_bytes(u64::MAX, 65_536), MIB);
        assert_eq!(extent_bytes(u64::MAX, 4 << 20), 4 * MIB);
    }

    #[test]
    fn very_many_extents_need_no_table() {
        let places = places(&[("a", SCORES_MAX * MIB)]);
        let placement = Placement::compute(&places, candidates(&[1, 1]));
        assert!(placement.table.is_none());
        let extent = Extent {
            file: FileIndex(0),
            number: 5,
        };
        let key: [&[u8]; 1] = [b"k"];
        assert_eq!(
            placement.owner(extent, &key),
            Some(placement.ranked_servers(extent, &key)[0])
        );
        assert_eq!(Placement::default().owner(extent, &key), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn every_extent_has_one_owner_within_bounds(
            sizes in prop::collection::vec(0u64..40 * MIB, 1..12),
            weights in prop::collection::vec(4 * MIB..200 * MIB, 1..9),
        ) {
            let paths: Vec<_> = (0..sizes.len()).map(|n| format!("f{n}")).collect();
            let paths = paths.iter().map(String::as_str);
            let files: Vec<_> = paths.zip(sizes.iter().copied()).collect();
            let places = places(&files);
            let all = candidates(&weights);
            let owners = owners(&places, &Placement::compute(&places, all.clone()));
            let total: u64 = sizes.iter().sum();
            prop_assert_eq!(owners.iter().map(|(_, bytes)| bytes).sum::<u64>(), total);
            let capacity: u64 = weights.iter().sum();
            if total + (all.len() as u64 + 1) * MIB < capacity {
                for candidate in all {
                    prop_assert!(load(&owners, candidate.server) <= candidate.weight);
                }
            }
        }
    }
}
