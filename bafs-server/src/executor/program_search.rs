//! Which programs a node lacks of those that its jobs would run. Starts none.

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where jobs look that have no `PATH`.
const SEARCH_PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";

/// Those of some programs that a job of this node would not find: each a path, or a name for the
/// `PATH` that jobs inherit.
pub(super) fn find_missing_programs(programs: Vec<String>) -> Vec<String> {
    let path = env::var_os("PATH").unwrap_or_else(|| SEARCH_PATH_DEFAULT.into());
    let directories: Vec<PathBuf> = env::split_paths(&path).collect();
    let is_missing = |program: &String| match program.contains('/') {
        true => !is_program(Path::new(program)),
        false => !directories
            .iter()
            .any(|directory| is_program(&directory.join(program))),
    };
    programs.into_iter().filter(is_missing).collect()
}

fn is_program(path: &Path) -> bool {
    let found = path.metadata();
    found.is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_name_and_path() {
        let asked = ["sh", "/bin/sh", "no-such-program", "/bin", "/etc/passwd"];
        let missing = find_missing_programs(asked.map(str::to_owned).to_vec());
        assert_eq!(missing, ["no-such-program", "/bin", "/etc/passwd"]);
    }
}
