//! Where unfinished workflows of a service send results: two that write the same place do not run
//! at once. Places are compared by their URLs; it asks no home.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::hash::Digest;
use bafs_queue::WorkflowId;
use bafs_workflow::{HomePathKey, Scheme, Url, Workflow, textual_key};
use serde::{Deserialize, Serialize};

/// Entries of ended workflows stay until there are so many entries in all.
const PURGE_MIN: usize = 4_096;

/// A place at a home: the first 8 bytes of the digest of its name. Two of a million places are
/// equal by accident once in 40 million times, and then a workflow waits.
type PlaceNumber = u64;

/// Where a workflow sends results: 8 bytes for each, as a service may hold millions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ResultPlaces {
    /// The files, and the directories of sets.
    targets: BTreeSet<PlaceNumber>,
    /// The directories above them.
    above: BTreeSet<PlaceNumber>,
}

impl ResultPlaces {
    /// The places that the extracts of a workflow name. `name_at` tells the name of the home at an
    /// address.
    pub(super) fn of_workflow(
        workflow: &Workflow,
        name_at: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let mut places = Self::default();
        let mut names: BTreeMap<&str, Option<String>> = BTreeMap::new();
        for extract in &workflow.extracts {
            let target = &extract.target;
            let name = match is_address(target) {
                true => names
                    .entry(&target.host)
                    .or_insert_with(|| name_at(&target.host))
                    .clone(),
                false => None,
            };
            let key = match name {
                Some(host) => textual_key(&Url {
                    host,
                    ..target.clone()
                }),
                None => textual_key(target),
            };
            if let Some(key) = key {
                places.add(&key);
            }
        }
        places
    }

    fn add(&mut self, key: &HomePathKey) {
        let mut name = key.home.clone().into_bytes();
        for part in &key.parts {
            self.above.insert(number_of(&name));
            name.push(0);
            name.extend(part.as_bytes());
        }
        self.targets.insert(number_of(&name));
    }
}

/// Whether a URL names a home server by its address.
fn is_address(url: &Url) -> bool {
    url.scheme == Scheme::Bafs && url.host.contains(':')
}

fn number_of(name: &[u8]) -> PlaceNumber {
    let Digest(digest) = Digest::of(name);
    let mut first = [0; size_of::<PlaceNumber>()];
    first.copy_from_slice(&digest[..size_of::<PlaceNumber>()]);
    PlaceNumber::from_le_bytes(first)
}

/// The places of all workflows that have not ended, and of some that have.
#[derive(Debug, Default)]
pub(super) struct PlaceIndex {
    targets: BTreeSet<(PlaceNumber, WorkflowId)>,
    above: BTreeSet<(PlaceNumber, WorkflowId)>,
    /// When entries of ended workflows are looked for.
    purge_at: usize,
}

impl PlaceIndex {
    /// Adds a workflow. `is_open` tells which ones have not ended.
    pub(super) fn insert(
        &mut self,
        id: WorkflowId,
        places: &ResultPlaces,
        is_open: impl Fn(WorkflowId) -> bool,
    ) {
        let with_id = |places: &BTreeSet<PlaceNumber>| -> Vec<_> {
            places.iter().map(|place| (*place, id)).collect()
        };
        self.targets.extend(with_id(&places.targets));
        self.above.extend(with_id(&places.above));
        if self.len() > self.purge_at.max(PURGE_MIN) {
            self.targets.retain(|(_, id)| is_open(*id));
            self.above.retain(|(_, id)| is_open(*id));
            self.purge_at = 2 * self.len();
        }
    }

    fn len(&self) -> usize {
        self.targets.len() + self.above.len()
    }

    /// Open workflows that send results to a place of these, or above or below one. Of those that
    /// send to the very same place the last one only: it waits for the others.
    pub(super) fn find_overlaps(
        &self,
        places: &ResultPlaces,
        is_open: impl Fn(WorkflowId) -> bool,
    ) -> BTreeSet<WorkflowId> {
        let mut found = BTreeSet::new();
        for place in places.targets.iter().chain(&places.above) {
            let mut same = entries_of(&self.targets, *place).rev();
            found.extend(same.find(|id| is_open(*id)));
        }
        for place in &places.targets {
            let below = entries_of(&self.above, *place);
            found.extend(below.filter(|id| is_open(*id)));
        }
        found
    }
}

fn entries_of(
    entries: &BTreeSet<(PlaceNumber, WorkflowId)>,
    place: PlaceNumber,
) -> impl DoubleEndedIterator<Item = WorkflowId> {
    let all = (place, WorkflowId(0))..=(place, WorkflowId(u64::MAX));
    entries.range(all).map(|(_, id)| *id)
}

/// Without those for which another one of them waits.
pub(super) fn drop_waited_for<'w>(
    mut found: BTreeSet<WorkflowId>,
    after_of: impl Fn(WorkflowId) -> &'w [WorkflowId],
) -> Vec<WorkflowId> {
    let waited = found.iter().flat_map(|id| after_of(*id));
    let waited: BTreeSet<WorkflowId> = waited.copied().collect();
    found.retain(|id| !waited.contains(id));
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(targets: &[&str]) -> ResultPlaces {
        let mut places = ResultPlaces::default();
        for target in targets {
            let url = target.parse().expect("a URL");
            places.add(&textual_key(&url).expect("a place"));
        }
        places
    }

    fn overlaps(index: &PlaceIndex, targets: &[&str]) -> Vec<u64> {
        let found = index.find_overlaps(&places(targets), |id| id != WorkflowId(9));
        found.into_iter().map(|id| id.0).collect()
    }

    #[test]
    fn places_overlap_above_and_below() {
        let mut index = PlaceIndex::default();
        for (id, target) in [
            (1, "bafs://home/a/b"),
            (2, "bafs://home/a/c/d"),
            (3, "bafs://other/a/b"),
            (9, "bafs://home/a/b"),
        ] {
            index.insert(WorkflowId(id), &places(&[target]), |_| true);
        }
        for (target, expected) in [
            ("bafs://home/a/b", &[1][..]),
            ("bafs://Home/a/b/", &[1]),
            ("bafs://home/a", &[1, 2]),
            ("bafs://home/a/b/c", &[1]),
            ("bafs://home/a/bc", &[]),
            ("bafs://home/b", &[]),
            ("bafs://other/a/b/c/d", &[3]),
        ] {
            assert_eq!(overlaps(&index, &[target]), expected, "{target}");
        }
        let both = overlaps(&index, &["bafs://other/a/b", "bafs://home/a/c/d"]);
        assert_eq!(both, [2, 3]);
    }

    #[test]
    fn address_of_a_home_counts_as_its_name() {
        let of = |target: &str| {
            let text = format!(
                "volume w scratch 1 MB\nmount w a /w\njob a {{\nexecutable = sh\n}}\n\
                 extract w x {target}\n"
            );
            let none = |path: &str| Err(path.to_owned());
            let parsed = bafs_workflow::parse_workflow("w.bafs", &text, &none);
            let workflow = parsed.expect("it is right").workflow;
            ResultPlaces::of_workflow(&workflow, |address| {
                (address == "10.0.0.1:7001").then(|| "home".to_owned())
            })
        };
        assert_eq!(of("bafs://10.0.0.1:7001/a"), of("bafs://home/a"));
        assert_ne!(of("bafs://10.0.0.1:7002/a"), of("bafs://home/a"));
    }

    #[test]
    fn last_writer_of_a_place_stands_for_others() {
        let mut index = PlaceIndex::default();
        for id in 0..4 {
            index.insert(WorkflowId(id), &places(&["bafs://home/a"]), |_| true);
        }
        assert_eq!(overlaps(&index, &["bafs://home/a"]), [3]);
        let found = [1, 2, 3].map(WorkflowId).into();
        let after = [WorkflowId(1)];
        let left = drop_waited_for(found, |id| match id.0 {
            3 => &after,
            _ => &[],
        });
        assert_eq!(left, [2, 3].map(WorkflowId));
    }

    #[test]
    fn ended_workflows_leave_the_index() {
        let mut index = PlaceIndex::default();
        for id in 0..20_000 {
            let target = format!("bafs://home/{id}");
            index.insert(WorkflowId(id), &places(&[&target]), |it| it.0 + 10 > id);
        }
        assert!(index.len() <= PURGE_MIN + 2, "{}", index.len());
    }
}
