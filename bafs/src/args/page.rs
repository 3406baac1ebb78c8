//! The command line of `bafs page`, and what `bafs run` has of it.

use std::path::PathBuf;

use clap::Args;

/// Any free port of this machine.
pub(crate) const PAGE_ADDRESS_DEFAULT: &str = "127.0.0.1:0";

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  bafs page blast.bafs\n  \
bafs page blast.bafs --address 127.0.0.1:8000\n\n\
The command prints a link that opens the page once, and serves until you press Ctrl-C. From \
another machine, forward the port: ssh -L 8000:127.0.0.1:8000 HOST.")]
pub(crate) struct PageArgs {
    /// Journal of the run, or its workflow if the journal is in the same directory.
    pub(crate) run: PathBuf,
    /// Address of this machine at which the page is served; by default any free port.
    #[arg(long, value_name = "HOST:PORT", default_value = PAGE_ADDRESS_DEFAULT)]
    pub(crate) address: String,
}

/// The page of a run that begins.
#[derive(Debug, Args)]
pub(crate) struct RunPageArgs {
    /// Serve a page with the progress of the run, and an HTTP API, at this address of this machine;
    /// by default any free port. A link that opens the page once goes to standard error.
    #[arg(
        long,
        value_name = "HOST:PORT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = PAGE_ADDRESS_DEFAULT
    )]
    pub(crate) page: Option<String>,
}
