//! The command line of `bafs profile`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    override_usage = "bafs profile [OPTIONS] -- COMMAND...\n       bafs profile [OPTIONS] \
WORKFLOW\n       bafs profile [OPTIONS]",
    after_help = "Example:\n  bafs profile --instance a -- bwa mem ref.fa a.fq -o a.sam\n  \
bafs profile --instance b -- bwa mem ref.fa b.fq -o b.sam\n  bafs profile --skeleton bwa.bafs\n\n\
Each command is added to the profile as the next stage of its instance. Without a command and a \
workflow, only the figures are printed. After a command, `--instance NAME -- COMMAND...` adds \
another one.\n\n\
Exit codes: 0 all commands succeeded; 1 failure; 2 usage error; any other code is that of the \
first command that failed."
)]
pub(crate) struct ProfileArgs {
    /// A workflow whose jobs run here, one after the other. Results do not go home.
    #[arg(conflicts_with = "command")]
    pub(crate) workflow: Option<PathBuf>,
    /// Name of the instance of the command; defaults to the next number.
    #[arg(long, value_name = "NAME", requires = "command")]
    pub(crate) instance: Option<String>,
    /// Directory whose files are traced, too; repeatable. The working directory is, and so are the
    /// directories of paths among the arguments, but not those of the system.
    #[arg(long, value_name = "DIR")]
    pub(crate) trace: Vec<PathBuf>,
    /// File of the profile, which grows with each command.
    #[arg(short, long, value_name = "FILE", default_value = "bafs.profile")]
    pub(crate) profile: PathBuf,
    /// Begin the profile anew.
    #[arg(long)]
    pub(crate) new: bool,
    /// Write a workflow that does the same, with volumes by roles.
    #[arg(long, value_name = "FILE")]
    pub(crate) skeleton: Option<PathBuf>,
    /// Write a picture of the lives of blocks in the first instance, as SVG.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// With a workflow: directory that is `bafs://home/`; defaults to the workflow's directory.
    #[arg(long, value_name = "DIR", requires = "workflow")]
    pub(crate) export: Option<PathBuf>,
    /// Files to list, by traffic.
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) files: usize,
    /// The program and its arguments.
    #[arg(last = true)]
    pub(crate) command: Vec<OsString>,
}
