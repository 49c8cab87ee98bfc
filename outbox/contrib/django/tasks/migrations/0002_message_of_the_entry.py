from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("outbox_tasks", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="taskentry",
            name="message_id",
            field=models.UUIDField(editable=False, null=True),
        ),
        migrations.AddField(
            model_name="taskentry",
            name="announced_at",
            field=models.DateTimeField(editable=False, null=True),
        ),
        migrations.AddIndex(
            model_name="taskentry",
            index=models.Index(fields=["status", "announced_at"], name="outbox_task_announced_at"),
        ),
    ]
