//! Finds the process that serves a pool.

use std::path::Path;

use super::Check;
use super::pool::subject;
use crate::backend::records::LOCK_FILE;
use crate::host::{FileId, Host};
use crate::model::PoolDefinition;

/// Which process serves the pool, from the kernel's list of locks; taking the lock could disturb a
/// starting driver.
pub(super) fn server(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Check {
    let subject = format!("{}: lock", subject(pool));
    let locks = host.read_file(Path::new("/proc/locks")).ok().flatten();
    let file = host.stat(&path.join(LOCK_FILE)).ok().flatten();
    let holder = file.and_then(|file| {
        let text = String::from_utf8_lossy(locks.as_deref().unwrap_or_default()).into_owned();
        holder(&text, file.id)
    });
    Check::ok(
        subject,
        match holder {
            Some(process) => format!("served by process {process}"),
            None => "no process that is visible from here serves it".into(),
        },
    )
}

/// `1: FLOCK  ADVISORY  WRITE 1234 08:01:393 0 EOF`. The device is that of the superblock, which on
/// btrfs differs from st_dev: there only the inode is compared.
fn holder(locks: &str, file: FileId) -> Option<String> {
    let device = format!(
        "{:02x}:{:02x}",
        nix::sys::stat::major(file.device),
        nix::sys::stat::minor(file.device)
    );
    let inode = file.inode.to_string();
    let held = locks.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[_, "FLOCK", _, "WRITE", process, place, ..] = &words[..] else {
            return None;
        };
        let (on, number) = place.rsplit_once(':')?;
        let same_device = on == device || nix::sys::stat::major(file.device) == 0;
        (number == inode && same_device).then(|| process.to_string())
    });
    held.into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_by_device_and_inode() {
        let table = "\
1: FLOCK  ADVISORY  WRITE 12 08:01:393 0 EOF
2: POSIX  ADVISORY  WRITE 13 08:01:394 0 EOF
3: FLOCK  ADVISORY  WRITE 14 fe:10:394 0 EOF
";
        let file = |major, minor, inode| FileId {
            device: nix::sys::stat::makedev(major, minor),
            inode,
        };
        assert_eq!(holder(table, file(8, 1, 393)), Some("12".into()));
        assert_eq!(holder(table, file(8, 1, 394)), None);
        assert_eq!(holder(table, file(0xfe, 0x10, 394)), Some("14".into()));
        assert_eq!(holder("", file(8, 1, 393)), None);
    }

    #[test]
    fn fuzz_the_table_of_locks() {
        let file = FileId {
            device: nix::sys::stat::makedev(8, 1),
            inode: 393,
        };
        let table = "1: FLOCK  ADVISORY  WRITE 12 08:01:393 0 EOF\n";
        slackwater_core::fuzz::fuzz_text("locks", &[table], |table| holder(table, file));
    }
}
