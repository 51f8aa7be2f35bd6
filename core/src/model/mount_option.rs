//! Mount options of a capability: which are refused, and which belong to a single mount.
//!
//! An option is one entry of `mount_flags`; it is never split at commas, because an SELinux label
//! (`context="system_u:object_r:container_file_t:s0:c1,c2"`) contains some.

use crate::error::Error;

/// Options that change what mount(2) does, or where, rather than the behavior of the file system.
const REFUSED: &[&str] = &[
    "bind",
    "rbind",
    "move",
    "remount",
    "loop",
    "offset",
    "sizelimit",
    "encryption",
    "shared",
    "rshared",
    "slave",
    "rslave",
    "private",
    "rprivate",
    "unbindable",
    "runbindable",
    "device",
    "logdev",
    "rtdev",
    "journal_path",
    "journal_dev",
    "norecovery",
    "usrjquota",
    "grpjquota",
];

/// Options that only mount(8) and fstab use.
const IGNORED: &[&str] = &[
    "defaults", "rw", "auto", "noauto", "user", "nouser", "users", "_netdev", "nofail",
];

/// SELinux labels; a kernel without SELinux refuses them.
const LABELS: &[&str] = &["context", "fscontext", "defcontext", "rootcontext"];

/// Maximum total length of all options: the limit of CSI, 4 KiB, which is also a page, the limit of
/// the kernel.
const TOTAL_BYTES: usize = 4096;

/// What replaces a harmful option.
enum Harm {
    /// Another option.
    Instead(&'static str),
    /// Nothing: the default of the file system applies.
    Nothing,
}

/// Options that stop the whole machine when one file system has an error, or that mount a file
/// system without the recovery that makes it consistent.
fn harm(option: &str) -> Option<Harm> {
    let value = option
        .split_once('=')
        .map(|(_, value)| value.trim_matches('"'));
    match (key(option), value) {
        ("errors", Some("panic")) => Some(Harm::Instead("errors=remount-ro")),
        ("fatal_errors", Some("panic")) => Some(Harm::Nothing),
        ("noload" | "norecovery" | "nologreplay" | "rescue", _) => Some(Harm::Nothing),
        _ => None,
    }
}

/// Refuses options that a new volume must not have. Volumes of an earlier release may have them:
/// see [`harmless`].
pub fn check_new(field: &str, options: &[String]) -> Result<(), Error> {
    match options.iter().find(|option| harm(option).is_some()) {
        Some(option) => Err(Error::invalid(
            field,
            format!(
                "{:?} with this value stops the machine at an error or skips recovery; omit it (ext4 is mounted with errors=remount-ro)",
                key(option)
            ),
        )),
        None => Ok(()),
    }
}

/// Removes from the options of a volume of an earlier release those that [`check_new`] refuses;
/// returns the rest and the keys of the removed ones.
pub fn harmless(options: &[String]) -> (Vec<String>, Vec<&str>) {
    let mut replaced = Vec::new();
    let kept = options.iter().filter_map(|option| match harm(option) {
        None => Some(option.clone()),
        Some(harm) => {
            replaced.push(key(option));
            match harm {
                Harm::Instead(other) => Some(other.to_string()),
                Harm::Nothing => None,
            }
        }
    });
    (kept.collect(), replaced)
}

/// The part before `=`.
pub fn key(option: &str) -> &str {
    option.split('=').next().unwrap_or(option)
}

/// Refuses options that are not allowed.
pub fn check(field: &str, options: &[String]) -> Result<(), Error> {
    for option in options {
        let why = if option.is_empty() {
            "is empty"
        } else if option.chars().any(char::is_control) {
            "contains a control character"
        } else if REFUSED.contains(&key(option)) {
            "is not supported for volumes of this driver"
        } else if option.contains(',') && !is_label(option) {
            "contains a comma; give each option as a separate entry"
        } else {
            continue;
        };
        return Err(Error::invalid(field, format!("{:?} {why}", key(option))));
    }
    let total: usize = options.iter().map(|option| option.len() + 1).sum();
    if total > TOTAL_BYTES {
        return Err(Error::invalid(
            field,
            format!("has {total} bytes in total; at most {TOTAL_BYTES} are allowed"),
        ));
    }
    Ok(())
}

/// Whether the option must not be passed to mount(2).
pub fn is_ignored(option: &str) -> bool {
    IGNORED.contains(&option) || option.starts_with("x-") || option.starts_with("X-")
}

/// Whether the option is an SELinux label.
pub fn is_label(option: &str) -> bool {
    LABELS.contains(&key(option)) && option.contains('=')
}

/// Whether the options request a read-only mount.
pub fn is_read_only(options: &[String]) -> bool {
    options
        .iter()
        .rev()
        .find_map(|option| match option.as_str() {
            "ro" => Some(true),
            "rw" => Some(false),
            _ => None,
        })
        == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    #[test]
    fn common_mount_options_are_allowed() {
        let label = "context=\"system_u:object_r:container_file_t:s0:c1,c2\"";
        assert!(
            check(
                "f",
                &options(&["noatime", "discard", "commit=30", "compress=zstd:3", label])
            )
            .is_ok()
        );
    }

    #[test]
    fn options_that_move_a_mount_are_refused_by_name() {
        for word in [
            "bind",
            "remount",
            "loop=/dev/loop0",
            "a,b",
            "",
            "logdev=/dev/sdb",
            "x\n",
        ] {
            let error = check("mount_flags", &options(&["noatime", word])).unwrap_err();
            assert!(error.to_string().contains("mount_flags"), "{error}");
        }
        assert!(check("f", &options(&["a"; 3000])).is_err());
    }

    #[test]
    fn options_that_stop_the_machine_or_skip_recovery_are_refused_for_new_volumes() {
        let harmful = options(&[
            "noatime",
            "errors=panic",
            "fatal_errors=panic",
            "noload",
            "nologreplay",
            "rescue=all",
        ]);
        for option in &harmful[1..] {
            let given = [harmful[0].clone(), option.clone()];
            check("f", &given).unwrap();
            let error = check_new("mount_flags", &given).unwrap_err().to_string();
            assert!(
                error.contains(key(option)) && !error.contains("panic"),
                "{error}"
            );
        }
        let (kept, replaced) = harmless(&harmful);
        assert_eq!(kept, options(&["noatime", "errors=remount-ro"]));
        assert_eq!(
            replaced,
            ["errors", "fatal_errors", "noload", "nologreplay", "rescue"]
        );
        let fine = options(&[
            "errors=remount-ro",
            "errors=continue",
            "discard",
            "fatal_errors=bug",
        ]);
        check_new("f", &fine).unwrap();
        assert_eq!(harmless(&fine), (fine.clone(), Vec::new()));
    }

    #[test]
    fn the_last_of_ro_and_rw_wins() {
        assert!(is_read_only(&options(&["rw", "ro"])));
        assert!(!is_read_only(&options(&["ro", "rw"])));
        assert!(!is_read_only(&options(&["noatime"])));
    }
}
