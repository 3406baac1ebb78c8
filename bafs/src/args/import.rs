//! Arguments of `bafs import`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Unpack a container image or a squashfs into a directory of a home, as the root of jobs.
    Image(ImportImageArgs),
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
