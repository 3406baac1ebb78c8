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
mod checked;
mod command;
mod declare;
mod diagnostic;
mod expand;
mod lex;
mod limits;
mod load;
mod names;
mod nearest;
mod order;
mod overlap;
mod parse;
mod parts;
mod path;
mod size;
mod submit;
mod url;

pub(crate) use checked::topological_sort;
pub use checked::{
    CachePolicy, ProgramSpec, Extract, FirstUsers, Job, JobIndex, Mount, SHARED_DIRECTORIES, Volume,
    VolumeIndex, VolumeKind, Workflow,
};
pub use diagnostic::{Diagnostic, WorkflowRejected, Severity};
pub(crate) use limits::EDGES_MAX;
pub(crate) use limits::FILES_MAX;
pub(crate) use limits::RUNTIME_S_MAX;
pub use limits::{DESCRIPTION_BYTES_MAX, FILE_BYTES_MAX};
pub use load::{CheckedWorkflow, parse_workflow};
pub use nearest::find_nearest;
pub(crate) use order::OrderSearch;
pub use size::{QuantityError, parse_duration, parse_duration_with_unit, parse_rate, parse_size};
pub use url::{Scheme, Url, UrlError};
