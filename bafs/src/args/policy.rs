//! Options that choose policies of the scheduler.

use bafs_sched::PolicyNames;
use clap::Args;

use super::UsageError;

/// Which policies the scheduler uses.
#[derive(Debug, Clone, Args)]
pub(crate) struct PolicyArgs {
    /// Policy to use in a family, such as replication=always; `bafs policies` lists them. May be
    /// repeated.
    #[arg(long = "policy", value_name = "FAMILY=NAME", value_parser = parse_policy)]
    named: Vec<String>,
    /// The replication policy, as versions before 0.2 named it.
    #[arg(long, value_name = "NAME", hide = true)]
    checkpoint: Option<String>,
}

impl PolicyArgs {
    /// Whether nobody named any.
    pub(crate) fn is_default(&self) -> bool {
        self.named.is_empty() && self.checkpoint.is_none()
    }

    /// The policies that were named, on top of these.
    pub(crate) fn over(&self, usual: PolicyNames) -> anyhow::Result<PolicyNames> {
        let mut names = usual;
        let checkpoint = self
            .checkpoint
            .iter()
            .map(|name| format!("replication={name}"));
        for named in checkpoint.chain(self.named.iter().cloned()) {
            names.choose(&named).map_err(UsageError::from_reason)?;
        }
        Ok(names)
    }
}

fn parse_policy(text: &str) -> Result<String, String> {
    PolicyNames::default()
        .choose(text)
        .map(|()| text.to_owned())
}
