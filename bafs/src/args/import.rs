//! Arguments of `bafs import`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Unpack a container image or a squashfs into a directory of a home, as the root of jobs.
    Image(ImportImageArgs),
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
#[command(
    after_help = "Example:\n  skopeo copy docker://python:3.13 oci-archive:python.tar\n  \
bafs import image python.tar ~/data/python\n\n\
A workflow gives it to a job as its whole file system:\n  \
volume python cache bafs://home/python 1 GB\n  root python JOB"
)]
pub(crate) struct ImportImageArgs {
    /// An OCI image layout in a tar, what `docker save` writes, or a squashfs; a tar may be
    /// compressed.
    pub(crate) archive: PathBuf,
    /// The directory, which appears when all of the image is in it.
    pub(crate) directory: PathBuf,
    /// Put it in the place of a directory that exists, in one step.
    #[arg(long)]
    pub(crate) replace: bool,
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
