//! The chat template of a program.

use std::path::Path;

use overdrive::generation::{Error, Message, ModelFiles};
use overdrive_examples::TemplateFlags;

#[test]
fn the_template_is_the_flags_then_the_adapters_then_the_models() {
    let folder = tempfile::tempdir().unwrap();
    let with = |name: &str, template: Option<&str>| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        if let Some(template) = template {
            std::fs::write(path.join("chat_template.jinja"), template).unwrap();
        }
        path
    };
    let files = ModelFiles::open(with("model", Some("of the model"))).unwrap();
    let (trained, plain) = (with("trained", Some("of the adapter")), with("plain", None));
    let mut flags = TemplateFlags {
        chat_template: None,
    };
    let rendered = |flags: &TemplateFlags, adapter: Option<&Path>| {
        let template = flags.load(&files, adapter).unwrap();
        template
            .render(&[Message::user("hello")], &Default::default())
            .unwrap()
    };
    assert_eq!(rendered(&flags, None), "of the model");
    assert_eq!(rendered(&flags, Some(&plain)), "of the model");
    assert_eq!(rendered(&flags, Some(&trained)), "of the adapter");
    let files_of_none = ModelFiles::open(&plain).unwrap();
    let error = flags.load(&files_of_none, None).unwrap_err();
    assert!(
        error.to_string().ends_with("with `--chat-template PATH`"),
        "{error}"
    );
    assert!(matches!(
        error.downcast_ref(),
        Some(Error::NoChatTemplate { .. })
    ));
    flags.chat_template = Some(with("other", Some("of the flag")));
    assert_eq!(rendered(&flags, Some(&trained)), "of the flag");
}
