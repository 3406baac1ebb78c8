//! The workflow language: text in, a checked [`Workflow`] or a list of errors out. Table of
//! contents only; nothing here plans, places or runs a job.
//!
//! ```text
//! text --lex, parse--> nodes --expand, declare--> declarations --check--> Workflow
//! ```

mod access;
mod ast;
mod bounds;
mod check;
mod command;
mod declarations;
mod diagnostic;
mod expand;
mod job_description;
mod job_order;
mod lex;
mod limits;
mod load;
mod model;
mod names;
mod overlaps;
mod parse;
mod path;
mod pipelines;
mod quantities;
mod spelling;
mod targets;
mod url;

pub use diagnostic::{Diagnostic, Severity, WorkflowRejected};
pub(crate) use job_order::OrderSearch;
pub(crate) use limits::EDGES_MAX;
pub(crate) use limits::FILES_MAX;
pub(crate) use limits::RUNTIME_S_MAX;
pub use limits::{DESCRIPTION_BYTES_MAX, FILE_BYTES_MAX};
pub use load::{CheckedWorkflow, parse_workflow};
pub(crate) use model::topological_sort;
pub use model::{
    CachePolicy, Extract, FirstUsers, Job, JobIndex, Mount, ProgramSpec, SHARED_DIRECTORIES,
    Volume, VolumeIndex, VolumeKind, Workflow,
};
pub use quantities::{
    QuantityError, parse_duration, parse_duration_with_unit, parse_rate, parse_size,
};
pub use spelling::find_nearest;
pub use url::{Scheme, Url, UrlError};
