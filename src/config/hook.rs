//! `[[hook]]`: only in the file, because a command cannot be written well as a flag.

use std::collections::BTreeSet;

use super::BadConfig;
use crate::hook::HookDefinition;

/// Checks that names are unique, because they identify hooks in messages and define their order.
pub(super) fn check_together(hooks: &[HookDefinition]) -> Result<(), BadConfig> {
    let mut names = BTreeSet::new();
    match hooks.iter().find(|hook| !names.insert(hook.name.as_str())) {
        None => Ok(()),
        Some(hook) => Err(BadConfig(format!(
            "hook: two hooks have the name {}; give each hook a different name",
            hook.name
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Given, RoleConfig, parse_file};
    use super::*;

    const LEAST: &str =
        "endpoint = \"unix:///x/csi.sock\"\nnode-name = \"n1\"\npool = [\"default=memory:\"]\n";

    fn file(text: &str) -> Result<Given, BadConfig> {
        parse_file(Path::new("c.toml"), &format!("{LEAST}{text}"))
    }

    #[test]
    fn hooks_are_tables_of_the_file() {
        let text = r#"
            [[hook]]
            name = "orders-db"
            command = ["/usr/lib/hold", "{seconds}"]
            user = "postgres"
            pvc = "shop/db-*"
            timeout = "20s"
            [[hook]]
            name = "all"
            command = ["/bin/hold"]
            volume = "*"
        "#;
        let RoleConfig::All { hooks, .. } = file(text).unwrap().finish().unwrap().role else {
            panic!("one node");
        };
        assert_eq!(hooks.len(), 2);
        assert_eq!(hooks[0].user.as_deref(), Some("postgres"));
        assert_eq!(hooks[0].arguments(), ["20"]);
        assert_eq!(hooks[1].name, "all");
    }

    #[test]
    fn what_is_wrong_with_one_is_reported_with_its_line() {
        let hook = |lines: &str| format!("[[hook]]\nname = \"a\"\n{lines}");
        for (text, words) in [
            (hook("command = [\"/x\"]\n"), "neither volume nor pvc"),
            (hook("volume = \"*\"\n"), "missing field `command`"),
            (hook("command = [\"x\"]\nvolume = \"*\"\n"), "absolute path"),
            (
                hook("command = [\"/x\"]\nvolume = \"*\"\nshell = true"),
                "unknown field `shell`",
            ),
        ] {
            let BadConfig(error) = file(&text).err().unwrap();
            assert!(error.contains(words), "{error}");
            assert!(error.starts_with("c.toml, line "), "{error}");
        }
        let twice = hook("command = [\"/x\"]\nvolume = \"*\"\n").repeat(2);
        let BadConfig(error) = file(&twice).unwrap().finish().unwrap_err();
        assert_eq!(
            error,
            "hook: two hooks have the name a; give each hook a different name"
        );
    }
}
