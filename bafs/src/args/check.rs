//! Arguments of the commands that read workflow files and run nothing.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs check blast.bafs\n  \
bafs check --local blast.bafs   # its files, too\n\n\
Exit codes: 0 no errors (warnings are possible); 1 errors, or the file cannot be read.")]
pub(crate) struct CheckArgs {
    /// The workflow file.
    pub(crate) workflow: PathBuf,
    /// Look at all files and programs of this machine, as `bafs run --local` uses them. Without it
    /// and without a cluster, only what is beside the workflow is looked at.
    #[arg(long)]
    pub(crate) local: bool,
    /// The same with this directory as `bafs://home/` in place of the workflow's.
    #[arg(long, value_name = "DIR")]
    pub(crate) export: Option<PathBuf>,
    /// Identity: a directory that `bafs init` or `bafs grant` created. With --catalog, look at the
    /// homes of that cluster.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs fmt blast.bafs\n  bafs fmt --check *.bafs\n\n\
Exit codes: 0 done, or nothing to do; 1 with --check, a file has another form, or a file cannot be \
read."
)]
pub(crate) struct FmtArgs {
    /// Workflow files or job descriptions; `-` reads standard input and prints the result.
    #[arg(required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Change nothing; name the files that have another form.
    #[arg(long)]
    pub(crate) check: bool,
}
