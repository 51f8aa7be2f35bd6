//! An image of another driver, from which volumes are imported.

use std::path::Path;

use slackwater::error::{Error, Result};
use slackwater::host::Host;
use slackwater::host::memory::MemoryHost;
use slackwater::model::size::MIB;
use slackwater::operation::{Driver, FileImport, Import, ImportFile, content_identity};

/// The directory of `--import-path`.
pub const TOP: &str = "/memory/rawfile";
pub const IMAGE: &str = "/memory/rawfile/pvc-1/disk.img";
pub const FOREIGN_BYTES: u64 = 32 * MIB;

/// Another driver writes a token to its image.
pub fn write(host: &MemoryHost) {
    let written = host.write_foreign_image(Path::new(IMAGE), FOREIGN_BYTES, 81);
    written.expect("the other driver can write");
}

/// Creates a volume that shares the blocks of the image.
pub(super) fn import(host: &MemoryHost, driver: &Driver, name: &str, size: u64) -> Result<String> {
    let below = Path::new(IMAGE).strip_prefix(TOP).expect("it is below");
    let opened = host.without_faults(|host| host.open_foreign(Path::new(TOP), below));
    let opened = opened.map_err(|error| Error::unreachable(IMAGE, error.to_string()))?;
    let request = ImportFile {
        import: Import {
            name: Some(name.into()),
            pool: Some("default".into()),
            size: Some(size),
            ..Import::default()
        },
        path: IMAGE.into(),
        identity: content_identity(&opened.state()),
        dry_run: false,
    };
    match driver.volumes.import_file(&request)? {
        FileImport::Shared(volume) => Ok(format!("{volume:?}")),
        other => panic!("{other:?}"),
    }
}
