//! The command line of `bafs sizes`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    after_help = "The output is a patch. It gives each volume of unknown size the most that \
it held, and a quarter more.\n\n\
Example:\n  bafs sizes blast.bafs | patch blast.bafs"
)]
pub(crate) struct SizesArgs {
    /// The workflow file.
    pub(crate) workflow: PathBuf,
    /// Journal of its runs; defaults to `WORKFLOW.journal`.
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
}
