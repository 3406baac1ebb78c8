//! Where a job and its volumes go.

pub(crate) mod capacity;
mod job_resources;
mod most_free;
mod placement_policy;
mod remaining_time;
pub(crate) mod remote_data;
pub(crate) mod scratch_volumes;
mod wow;

pub(crate) use placement_policy::Placement;

/// All of them, the default first.
pub(crate) static PLACEMENTS: &[&dyn Placement] =
    &[&capacity::Capacity, &most_free::MostFree, &wow::Wow];
