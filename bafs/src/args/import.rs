//! Arguments of `bafs import`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// From WfFormat, the JSON of WfCommons, with sizes and run times.
    #[command(
        after_help = "Example:\n  bafs import wfformat blast.json --trace blast.csv\n  \
bafs sim blast.json.bafs --trace blast.csv --environment cluster.toml --all\n  \
bafs import wfformat blast.json --stand-in 0.01   # jobs that only read, sleep and write"
    )]
    Wfformat(WfformatArgs),
    /// From DAGMan: a .dag file and its submit files.
    #[command(after_help = "Example:\n  bafs import dagman search.dag\n  \
bafs run search.dag.bafs --local 4")]
    Dagman(ImportArgs),
    /// From Makeflow: rules with targets and sources.
    #[command(after_help = "Example:\n  bafs import makeflow search.mf -o search.bafs")]
    Makeflow(ImportArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The file to import.
    pub(crate) file: PathBuf,
    /// File of the workflow, `-` for standard output; defaults to the file's name with `.bafs`.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// URL of the home directory with the inputs, which also gets the results.
    #[arg(long, value_name = "URL", default_value = "bafs://home/")]
    pub(crate) home: String,
    /// Replace an existing output file.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WfformatArgs {
    #[command(flatten)]
    pub(crate) import: ImportArgs,
    /// Write run times and bytes into this file, for `bafs sim --trace`.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Replace the commands by programs that read the inputs, sleep for this share of the run time,
    /// and write as many bytes.
    #[arg(long, value_name = "SHARE")]
    pub(crate) stand_in: Option<f64>,
}
