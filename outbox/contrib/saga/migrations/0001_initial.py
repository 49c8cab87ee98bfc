from django.db import migrations, models
import outbox.contrib.django.models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='SagaProgress',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('saga', models.CharField(max_length=127)),
                ('record', models.CharField(max_length=255)),
                ('state', models.CharField(choices=[('running', 'Running'), ('waiting', 'Waiting for an answer'), ('undoing', 'Being undone'), ('done', 'Done'), ('undone', 'Undone')], max_length=16)),
                ('step', models.CharField(max_length=100)),
                ('reason', models.TextField(default='')),
                ('changed_at', models.DateTimeField()),
                ('late_at', models.DateTimeField(null=True)),
                ('message_id', models.UUIDField(null=True)),
            ],
            options={
                'verbose_name': 'saga',
                'db_table': 'outbox_saga',
                'indexes': [models.Index(fields=['state', 'changed_at'], name='outbox_saga_changed_at')],
                'constraints': [models.UniqueConstraint(fields=('saga', 'record'), name='outbox_saga_of_record')],
            },
        ),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_saga'), migrations.RunPython.noop, atomic=False),
    ]
