//! Memory and room for temporary files: jobs go where both are free.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::describe::{bytes_only, describe_bytes};
use crate::policy::View;

impl View<'_> {
    /// Whether a node has free memory for a job now, and room for its temporary files.
    pub(crate) fn has_room_for_job(&self, job: JobIndex, server: ServerId) -> bool {
        self.fleet.get(server).is_some_and(|node| {
            self.memory_of(job) <= node.free_memory() && self.has_job_resources(job, node)
        })
    }

    /// Whether a job asks for what not every node has, but for slots and volumes.
    pub(crate) fn asks_for_resources(&self, job: JobIndex) -> bool {
        let limits = &self.graph.workflow.job(job).limits;
        self.memory_of(job) > 0 || limits.temporary_bytes.is_some()
    }

    /// A job that asks for more memory, or room for temporary files, than any node has.
    pub(crate) fn too_demanding(&self) -> Option<String> {
        let memory = self.fleet.largest_memory();
        let nodes = self.fleet.live().filter(|(_, node)| node.seen.slots > 0);
        let temporary = nodes.map(|(_, node)| node.temporary_bytes()).max();
        let temporary = temporary.unwrap_or(0);
        let asks = |job: &JobIndex| {
            let limits = &self.graph.workflow.job(*job).limits;
            let disk = limits.temporary_bytes.unwrap_or(0);
            self.memory_of(*job) > memory || disk > temporary
        };
        let found = self.jobs_left().find(asks)?;
        let (name, asked) = (&self.graph.workflow.job(found).name, self.memory_of(found));
        Some(match asked > memory {
            true => format!(
                "job '{name}' asks for {} of memory, but no node has more than {}; add a larger \
                 node, or request less memory",
                describe_bytes(bytes_only(asked)),
                describe_bytes(bytes_only(memory))
            ),
            false => format!(
                "job '{name}' asks for more disk space in /tmp than any node has, which is {}; \
                 start nodes with a larger --tmp, or request less disk space",
                describe_bytes(bytes_only(temporary))
            ),
        })
    }
}
