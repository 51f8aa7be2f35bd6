//! Raw block volumes on pools of LVM, which the LVM of the host must ignore (docs/adr/0035).

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::host::Host;
use crate::model::{PoolDefinition, PoolPlace};
use crate::record::{self, LvmFilterRecord};

/// What makes LVM ignore the devices of this driver.
pub const FILTER: &str = r#"global_filter = [ "r|^/dev/mapper/slackwater-|" ]"#;

/// The file that says that LVM ignores them.
pub fn filter_record(node_record: &Path) -> PathBuf {
    node_record.with_file_name("lvm-filter.json")
}

/// Refuses raw block volumes on a pool of LVM, unless doctor has seen that LVM ignores them, or the
/// administrator vouches for it.
///
/// # Errors
///
/// [`Error::Refused`]; [`Error::Damaged`] if the file cannot be read.
pub fn check(host: &dyn Host, node_record: &Path, pool: &PoolDefinition) -> Result<()> {
    let PoolPlace::Lvm { .. } = pool.place else {
        return Ok(());
    };
    if pool.raw_block.is_some() {
        return Ok(());
    }
    let seen: Option<LvmFilterRecord> = record::load(host, &filter_record(node_record))?;
    match seen {
        Some(_) => Ok(()),
        None => Err(Error::refused(
            format!("pool {}", pool.name),
            format!(
                "it has no raw block volumes until it is known that LVM on this machine ignores them: LVM would activate the volume groups that a tenant writes into one; set `{FILTER}` in the section `devices` of /etc/lvm/lvm.conf, then run `slackwater doctor` on the host, or give the pool the option rawBlock=unfiltered"
            ),
        )),
    }
}
