//! Arguments of `bafs config`, `bafs completions` and `bafs man-pages`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
#[command(
    after_help = "Files: ~/.config/bafs/bafs.toml, then /etc/bafs/bafs.toml; or only the one that \
BAFS_CONFIG names.\n\n\
Example:\n  bafs config\n  bafs config node --slots 4   # what this command would use"
)]
pub(crate) struct ConfigArgs {
    /// A command with its options; shows where each of its values is from.
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) words: Vec<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs completions bash > ~/.local/share/bash-completion/\
completions/bafs"
)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManPagesArgs {
    /// Directory for the pages; created if needed.
    pub(crate) directory: PathBuf,
}
