//! Room for batch volumes: what is begun beside each other leaves so much that all fit which one
//! stage reads at once. Otherwise pipelines fill the nodes to the last byte, a cache finds room
//! only where another one goes, and jobs run one after the other. Whether pipelines can end is
//! judged in `policy/admission/bankers_check.rs`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::space::Space;
use crate::state::planned_volumes::Create;

/// Nodes of a group that are looked at one by one for what their pipelines leave.
const NODES_LOOKED_AT: usize = 1_024;

impl View<'_> {
    /// Whether a start that makes scratch volumes leaves room for the batch volumes that one stage
    /// reads at once, beside what the pipelines under way need to end, on each node one after the
    /// other. Where nothing runs, something must, with room for them or not.
    pub(crate) fn leaves_room_for_batch(
        &self,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
        taken: &BTreeMap<ServerId, Space>,
    ) -> bool {
        let is_cache = |volume: &VolumeIndex| self.graph.volume(*volume).is_cache;
        let made = creates.iter().map(|(volume, ..)| *volume);
        let (caches, scratch): (BTreeSet<VolumeIndex>, _) = made.partition(is_cache);
        if self.attempts.is_empty() || scratch.is_empty() || self.fleet.is_sole(server) {
            return true;
        }
        let lacking = self.lacking_batch(server, &caches);
        if lacking == 0 {
            return true;
        }
        let members = self.fleet.group_of(server);
        let members = members.filter(|(_, node)| node.takes_work());
        let members: Vec<ServerId> = members.map(|(id, _)| id).collect();
        let taken = |node: ServerId| taken.get(&node).copied().unwrap_or_default();
        // No pipeline needs more than this: mostly that tells already.
        let most = self.graph.courses.most.least.bytes;
        let (mut usable, mut room) = (0u64, 0u64);
        for &node in &members {
            let left = self.fleet.available(node).saturating_sub(taken(node)).bytes;
            room = room.saturating_add(left.saturating_sub(most));
            usable = usable.saturating_add(self.fleet.usable(node).bytes);
        }
        if room >= lacking || lacking > usable || members.len() > NODES_LOOKED_AT {
            return true;
        }
        let room = members.into_iter().fold(0u64, |room, node| {
            let start = (node == server).then_some((job, creates));
            room.saturating_add(self.spare_beside_ends(node, taken(node), start))
        });
        room >= lacking
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    /// What the sets of this workflow read, by name.
    fn sets(text: &str) -> Vec<String> {
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none)
            .expect("it parses")
            .workflow;
        let graph = crate::state::jobs::Graph::new(workflow);
        let name = |volume: &VolumeIndex| graph.workflow.volume(*volume).name.clone();
        let join = |set: &BTreeSet<VolumeIndex>| set.iter().map(name).collect::<Vec<_>>().join(" ");
        graph.batch.sets.iter().map(join).collect()
    }

    #[test]
    fn caches_read_in_one_level_form_one_set() {
        let mut text = String::from(
            "volume a cache bafs://h/a 3 GB\nvolume b cache bafs://h/b 2 GB\n\
             volume c cache bafs://h/c 4 GB\n",
        );
        for pipeline in 0..2 {
            text += &format!("volume own{pipeline} cache bafs://h/own{pipeline} 1 GB\n");
            for (job, cache) in [("x", "a"), ("y", "b"), ("z", "c")] {
                text += &format!(
                    "job {job}{pipeline} {{\nexecutable = x\n}}\n\
                     volume {job}out{pipeline} scratch 1 MB\n\
                     mount {job}out{pipeline} {job}{pipeline} /out\n\
                     mount own{pipeline} {job}{pipeline} /own\n\
                     mount {cache} {job}{pipeline} /db\n"
                );
                if job != "x" {
                    text += &format!(
                        "parent x{pipeline} child {job}{pipeline}\n\
                         mount xout{pipeline} {job}{pipeline} /in ro\n"
                    );
                }
            }
        }
        assert_eq!(
            sets(&text),
            ["b c", "a"],
            "the largest first, none that one pipeline has"
        );
    }
}
