//! The tests of this crate from outside as one program, for each program is linked with all again.

mod workflow;
mod workflow_errors;
mod workflow_pipelines;
mod workflow_properties;
mod workflow_roots;
